"""Prompts for rollouts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nemo_style_rlhf.data import hh
from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.layouts import (
    PROMPT_COLUMNS,
    as_messages,
    conversation,
    input_column,
    instruction,
    read_prompt,
    with_system,
)
from nemo_style_rlhf.data.mixtures import TrainingRows, load_training_rows
from nemo_style_rlhf.data.records import Dropped, DropReport, Record, usable
from nemo_style_rlhf.data.sources import described, read_records
from nemo_style_rlhf.data.template_files import render
from nemo_style_rlhf.data.turns import (
    CONVERSATION_COLUMNS,
    is_conversation,
    require_known_speaker,
    tools,
    unpacked,
    without_last_answer,
)
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.chat import Chat, Message, plain_text
from nemo_style_rlhf.schema.data import PromptDataConfig, PromptRowsConfig
from nemo_style_rlhf.schema.generation import NO_OVERRIDES, SamplingOverrides
from nemo_style_rlhf.schema.model_files import rows_of
from nemo_style_rlhf.schema.sources import Sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """A prompt for the policy, with its metadata."""

    prompt_id: int
    """Row number in its source, with the source's number in a mixture in the higher digits. Sample seeds derive from it, so
    dropping other rows changes nothing."""
    token_ids: list[int]
    text: str
    """The text of ``token_ids``, with templates applied, without the special tokens that the tokenizer adds."""
    label: str | None = None
    """Reference answer for reward functions."""
    chat: Chat | None = None
    """The conversation of which a chat template made ``text``."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The other fields of the row, and the label's as the row holds it; reward functions get them by name."""
    sampling: SamplingOverrides = NO_OVERRIDES


def load_prompts(
    sources: Sources,
    config: PromptRowsConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    whole_distribution: bool = False,
    first_id: int = 0,
) -> tuple[list[Prompt], DropReport]:
    """Tokenized prompts of one source, in its order.

    A conversation that ends with an answer is cut before it, like an HH transcript, and counted in the report. The following are
    dropped and counted: prompts longer than ``config.max_prompt_length`` tokens, empty prompts, conversations without a turn
    before the answer or that the chat template refuses, HH transcripts without an answer, and rows that lack a column or hold
    something else in it.

    Args:
        whole_distribution: refuse rows whose own settings exclude a part of the distribution.
        first_id: id of a prompt in the first row.

    Raises:
        UserError: the source is missing or has broken JSON, or no prompt is left.
    """
    encoder = Encoder(tokenizer, chat_template=config.chat_template, today=config.today, rows=rows_of(tokenizer))
    read = prompt_reader(config, encoder, whole_distribution=whole_distribution, first_id=first_id)
    rows, report = usable(read_records(sources), read, described(sources))
    report.cut = sum(cut for _, cut in rows)
    report.require_kept()
    return [prompt for prompt, _ in rows], report


def prompt_reader(
    config: PromptRowsConfig, encoder: Encoder, *, whole_distribution: bool = False, first_id: int = 0
) -> Callable[[Record], tuple[Prompt, bool]]:
    """A function that makes a row's prompt and tells whether it was cut before its last answer; see :func:`load_prompts`."""

    def read(record: Record) -> tuple[Prompt, bool]:
        key = _prompt_column(record, config)
        record = unpacked(record, key)
        label, metadata = _label(record, config), _metadata(record, key, config)
        text, chat, cut = _prompt_text(record, key, config, encoder)
        token_ids = encoder.rendered(text) if config.by_chat_template else encoder.prompt(text)
        if not token_ids:
            raise Dropped("empty")
        if len(token_ids) > config.max_prompt_length:
            raise Dropped(f"longer than {config.max_prompt_length} tokens", advice="raise data.max_prompt_length")
        sampling = _sampling(record, config)
        if whole_distribution and sampling.cut:
            raise UserError(
                f"{record.where}: {sampling.cut} leaves out a part of the distribution but algorithm.old_logprobs=sampler "
                "needs log-probabilities of the whole one: take it out of the row, or use algorithm.old_logprobs=trainer"
            )
        return Prompt(first_id + record.index, token_ids, text, label, chat, metadata, sampling), cut

    return read


def load_training_prompts(
    config: PromptDataConfig, tokenizer: "PreTrainedTokenizerBase", *, whole_distribution: bool = False
) -> TrainingRows[Prompt]:
    """The prompts of ``data.train_path`` or ``data.mixture``; see :func:`load_prompts`."""

    def load(sources: Sources, first_id: int) -> tuple[list[Prompt], DropReport]:
        return load_prompts(sources, config, tokenizer, whole_distribution=whole_distribution, first_id=first_id)

    return load_training_rows(config, load)


def _prompt_column(record: Record, config: PromptRowsConfig) -> str:
    if config.format == "hh":
        return record.column(config.prompt_key, ("chosen",))
    if config.format == "messages":
        return record.column(config.prompt_key, (*CONVERSATION_COLUMNS, "prompt"))
    both = (*PROMPT_COLUMNS, *CONVERSATION_COLUMNS) if config.apply_chat_template else PROMPT_COLUMNS
    key = record.column(config.prompt_key, both)
    held = next(filter(record.has, CONVERSATION_COLUMNS), None)
    if key not in record.fields and held:
        raise Dropped(
            f"without the key {key!r}",
            f"{record.where} has no {key!r} but a conversation in {held!r}: set data=messages, which reads it through the "
            "tokenizer's chat template",
        )
    return key


def _prompt_text(record: Record, key: str, config: PromptRowsConfig, encoder: Encoder) -> tuple[str, Chat | None, bool]:
    """The text, the conversation of which it was made, and whether that was cut before its last answer."""
    if config.format == "messages":
        return _rendered(conversation(record, key, "data.prompt_key", config), record, key, encoder)
    if config.format == "text" and config.apply_chat_template:
        return _rendered(as_messages(read_prompt(record, key, config), record, config), record, key, encoder)
    if is_conversation(record.get(key, "data.prompt_key")):
        raise Dropped(
            f"whose {key!r} is no text",
            f"{record.where}: {key!r} holds a {type(record.fields[key]).__name__}, which data.format={config.format} does not "
            f"read: for a conversation set data=messages and data.prompt_key={key}",
        )
    text = instruction(record, key, config)
    if config.format != "hh":
        return render(config.prompt_template, text), None, False
    if (transcript := hh.cut_last_answer(text)) is None:
        raise Dropped("without an assistant turn")
    if config.apply_chat_template:
        return _rendered(with_system(record, hh.prompt_messages(transcript), config), record, key, encoder)
    return render(config.prompt_template, transcript), None, False


def _rendered(turns: list[Message], record: Record, key: str, encoder: Encoder) -> tuple[str, Chat, bool]:
    require_known_speaker(turns, record, key)
    prompt = without_last_answer(turns)
    if prompt[-1]["role"] == "user" and not plain_text(prompt[-1]).strip():
        raise Dropped("empty")
    chat = Chat(prompt, tools(record), encoder.today)
    text = encoder.whole_chat(chat.messages, add_generation_prompt=True, tools=chat.tools)
    return text, chat, len(prompt) < len(turns)


def _label(record: Record, config: PromptRowsConfig) -> str | None:
    label = None if config.label_key is None else record.get(config.label_key, "data.label_key")
    return None if label is None else str(label)


def _metadata(record: Record, key: str, config: PromptRowsConfig) -> dict[str, Any]:
    used = {key, input_column(record, key, config), config.sampling_key}
    if config.format == "hh":
        used.add("rejected")
    return {name: value for name, value in record.fields.items() if name not in used}


def _sampling(record: Record, config: PromptRowsConfig) -> SamplingOverrides:
    """The row's own sampling settings, if any."""
    given = record.fields.get(config.sampling_key) if config.sampling_key else None
    return NO_OVERRIDES if given is None else SamplingOverrides.parse(given, record.where)

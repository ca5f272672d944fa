"""Prompts for rollouts."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.data.encoding import TOOLS_KEY, Encoder
from nemo_style_rlhf.data.hh import cut_last_answer
from nemo_style_rlhf.data.instructions import instruction
from nemo_style_rlhf.data.records import Dropped, DropReport, Record, read_records
from nemo_style_rlhf.data.templates import render
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.data import PromptRowsConfig
from nemo_style_rlhf.schema.generation import NO_OVERRIDES, SamplingOverrides

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a turn of a conversation may have."""


@dataclass(frozen=True)
class Prompt:
    """A prompt for the policy, with its metadata."""

    prompt_id: int
    """Row number in its file; sample seeds derive from it, so dropping other rows changes nothing."""
    token_ids: list[int]
    text: str
    """The text of ``token_ids``, with templates applied, without the special tokens that the tokenizer adds."""
    label: str | None = None
    """Reference answer for reward functions."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The other fields of the row, and the label's as the row holds it; reward functions get them by name."""
    sampling: SamplingOverrides = NO_OVERRIDES


def load_prompts(
    path: str, config: PromptRowsConfig, tokenizer: PreTrainedTokenizerBase, *, whole_distribution: bool = False
) -> tuple[list[Prompt], DropReport]:
    """Tokenized prompts of one file, in its order.

    A conversation that ends with an answer is cut before it, like an HH transcript, and counted in the report. The following are
    dropped and counted: prompts longer than ``config.max_prompt_length`` tokens, empty prompts, conversations without a turn
    before the answer or that the chat template refuses, and HH transcripts without an answer.

    Args:
        whole_distribution: refuse rows whose own settings exclude a part of the distribution.

    Raises:
        UserError: the file is missing, has broken JSON or a missing key, or no prompt is left.
    """
    encoder = Encoder(tokenizer, chat_template=config.chat_template)
    report = DropReport(path)
    prompts = []
    for record in read_records(path):
        try:
            text, cut = _prompt_text(record, config, encoder)
            token_ids = encoder.rendered(text) if config.format == "messages" else encoder.prompt(text)
            if not token_ids:
                raise Dropped("empty")
            if len(token_ids) > config.max_prompt_length:
                raise Dropped(f"longer than {config.max_prompt_length} tokens")
        except Dropped as reason:
            report.drop(str(reason), record)
        else:
            label, metadata = _label(record, config), _metadata(record, config)
            sampling = _sampling(record, config)
            if whole_distribution and sampling.cut:
                raise UserError(
                    f"{record.where}: {sampling.cut} leaves out a part of the distribution but algorithm.old_logprobs=sampler "
                    "needs log-probabilities of the whole one: take it out of the row, or use algorithm.old_logprobs=trainer"
                )
            prompts.append(Prompt(record.index, token_ids, text, label, metadata, sampling))
            report.cut += cut
    report.kept = len(prompts)
    report.require_kept("check the file, or raise data.max_prompt_length")
    return prompts, report


def _prompt_text(record: Record, config: PromptRowsConfig, encoder: Encoder) -> tuple[str, bool]:
    """The text, and whether a conversation was cut before its last answer."""
    if config.format == "messages":
        messages = record.get(config.key, "data.prompt_key")
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise UserError(
                f"{record.where}: {config.key!r} is not a list of messages: check the file or set data.format=text"
            )
        if (role := messages[-1].get("role")) not in ROLES:
            raise UserError(
                f"{record.where}: the last of {config.key!r} has the role {role!r}, expected one of {', '.join(ROLES)}: rename "
                "the keys and roles of its turns, or an answer would be read as a part of the prompt"
            )
        prompt = without_last_answer(messages)
        text = encoder.chat(prompt, add_generation_prompt=True, tools=record.fields.get(TOOLS_KEY))
        return text, len(prompt) < len(messages)
    if isinstance(record.get(config.key, "data.prompt_key"), list):
        raise UserError(
            f"{record.where}: {config.key!r} holds a list, which data.format={config.format} does not read: for a conversation "
            f"set data=messages and data.prompt_key={config.key}"
        )
    text = instruction(record, config.key, config)
    transcript = cut_last_answer(text) if config.format == "hh" else text
    if transcript is None:
        raise Dropped("without an assistant turn")
    return render(config.prompt_template, transcript), False


def without_last_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` without the answer at their end; all of them if they do not end with an answer.

    An answer consists of the assistant's last turns and the tools' turns between them.

    Raises:
        Dropped: only system turns precede the answer.
    """
    end = len(messages)
    if messages[-1].get("role") == "assistant":
        while end and messages[end - 1].get("role") in ("assistant", "tool"):
            end -= 1
        if all(message.get("role") in ("system", "developer") for message in messages[:end]):
            raise Dropped("without a turn before the answer")
    return messages[:end]


def _label(record: Record, config: PromptRowsConfig) -> str | None:
    return None if config.label_key is None else str(record.get(config.label_key, "data.label_key"))


def _metadata(record: Record, config: PromptRowsConfig) -> dict[str, Any]:
    used = {config.key, config.input_key, config.sampling_key}
    if config.format == "hh":
        used.add("rejected")
    return {key: value for key, value in record.fields.items() if key not in used}


def _sampling(record: Record, config: PromptRowsConfig) -> SamplingOverrides:
    """The row's own sampling settings, if any."""
    given = record.fields.get(config.sampling_key) if config.sampling_key else None
    return NO_OVERRIDES if given is None else SamplingOverrides.parse(given, record.where)

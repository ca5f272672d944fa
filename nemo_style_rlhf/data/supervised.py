"""Turns rows of the supervised stages into token ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.data.encoding import TOOLS_KEY, Encoder
from nemo_style_rlhf.data.hh import split_last_answer
from nemo_style_rlhf.data.instructions import instruction
from nemo_style_rlhf.data.records import Dropped, DropReport, Record, read_records
from nemo_style_rlhf.data.templates import render
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.supervised import (
    PairDataConfig,
    PreferenceDataConfig,
    SFTDataConfig,
    SupervisedDataConfig,
    UnpairedDataConfig,
)

Row = TypeVar("Row")
ADVICE = "check the file, or raise data.max_length"


@dataclass(frozen=True)
class SFTExample:
    """One text to imitate."""

    token_ids: list[int]
    prompt_length: int
    """Number of tokens at the beginning that are no loss tokens; 0 in plain text."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        return len(self) - max(self.prompt_length, 1)

    def learned(self) -> list[bool]:
        """Whether each token is a loss token; the first never is, since no token before it predicts it."""
        return [position >= max(self.prompt_length, 1) for position in range(len(self))]


@dataclass(frozen=True)
class Conversation(SFTExample):
    """Several answers, with text between them that has no loss tokens."""

    read: list[tuple[int, int]]
    """Begin and end of each such text, as token positions."""

    @property
    def num_loss_tokens(self) -> int:
        return super().num_loss_tokens - sum(end - start for start, end in self.read)

    def learned(self) -> list[bool]:
        learned = super().learned()
        for start, end in self.read:
            learned[start:end] = [False] * (end - start)
        return learned


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt, prompt included in both."""

    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0
    prompt_length: int = 0
    """Number of tokens of the prompt, at the beginning of both."""
    subset: str = ""
    """The row's subset, by which evaluations are split."""

    def __len__(self) -> int:
        return max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True)
class UnpairedExample(SFTExample):
    """One answer to a prompt, judged by itself."""

    desirable: bool


def load_sft(
    path: str, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[SFTExample], DropReport]:
    """The usable rows of one file, in its order, and a report on the others.

    Raises:
        UserError: the file is missing, has broken JSON or a missing key, or no row is left.
    """
    encoder = Encoder(tokenizer, chat_template=config.chat_template)
    return _usable(path, lambda record: _sft_example(record, config, encoder))


def load_pairs(
    path: str, config: PairDataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[PreferencePair], DropReport]:
    """The usable pairs of one file, in its order, and a report on the others: too long pairs, equal answers, empty answers, HH
    transcripts whose prompts differ.

    Raises:
        UserError: see :func:`load_sft`.
    """
    encoder = Encoder(tokenizer, chat_template=config.chat_template)
    return _usable(path, lambda record: _pair(record, config, encoder))


def load_unpaired(
    path: str, config: UnpairedDataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[UnpairedExample], DropReport]:
    """The usable judged answers of one file, in its order, and a report on the other rows. A pair becomes two answers, the
    desirable one first; if one of them is unusable, both are dropped.

    Raises:
        UserError: see :func:`load_sft`; or a label is neither true nor false.
    """
    encoder = Encoder(tokenizer, chat_template=config.chat_template)
    rows, report = _usable(path, lambda record: _judged(record, config, encoder))
    return [example for examples in rows for example in examples], report


def _usable(path: str, encode: Callable[[Record], Row]) -> tuple[list[Row], DropReport]:
    rows, report = [], DropReport(path)
    for record in read_records(path):
        try:
            rows.append(encode(record))
        except Dropped as reason:
            report.drop(str(reason), record)
    report.kept = len(rows)
    report.require_kept(ADVICE)
    return rows, report


def _sft_example(record: Record, config: SFTDataConfig, encoder: Encoder) -> SFTExample:
    layout = _sft_format(record, config) if config.format == "auto" else config.format
    if layout == "text":
        prompt_ids: list[int] = []
        response = record.text(config.text_key, "data.text_key")
        ids = encoder.response("", [], response, append_eos=config.append_eos)
    elif layout == "messages":
        return _conversation(record, config, encoder)
    else:
        prompt = Prompt(render(config.prompt_template, instruction(record, config.prompt_key, config)))
        response = record.text(config.response_key, "data.response_key")
        return _examples(prompt, (response,), config, encoder)[0]
    _check(response, len(prompt_ids) + len(ids), config.max_length)
    return SFTExample(prompt_ids + ids, len(prompt_ids))


def _sft_format(record: Record, config: SFTDataConfig) -> str:
    if config.messages_key in record.fields:
        return "messages"
    if config.text_key in record.fields and config.response_key not in record.fields:
        return "text"
    return "prompt_response"


def _conversation(record: Record, config: SFTDataConfig, encoder: Encoder) -> Conversation:
    """Tokens of the rendered conversation, turn by turn. Each answer has the tokens that follow its prompt at inference."""
    messages = _messages(record, config.messages_key, "data.messages_key")
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns or turns[-1] != len(messages) - 1:
        raise Dropped("without an assistant's last turn")
    text, answer, ids, read = "", "", list[int](), list[tuple[int, int]]()
    chat = partial(encoder.chat, tools=record.fields.get(TOOLS_KEY))
    for turn in turns if config.learn == "all_answers" else turns[-1:]:
        prompt = chat(messages[:turn], add_generation_prompt=True)
        answer = _rendered_answer(prompt, messages[: turn + 1], chat)
        if not prompt.startswith(text):
            raise Dropped("rendered differently with an answer than without")
        start = len(ids)
        ids += encoder.response(text, ids, prompt[len(text) :], append_eos=False, rendered=True)
        read.append((start, len(ids)))
        text, last = prompt + answer, turn == turns[-1]
        ids += encoder.response(prompt, ids, answer, append_eos=config.append_eos and last, rendered=True)
    _check(answer, len(ids), config.max_length)
    return Conversation(ids, read[0][1], read[1:])


def _pair(record: Record, config: PairDataConfig, encoder: Encoder) -> PreferencePair:
    prompt, chosen, rejected = _two_answers(record, config, encoder)
    if chosen == rejected:
        raise Dropped("with equal responses")
    preferred, other = _examples(prompt, (chosen, rejected), config, encoder)
    margin, subset = 0.0, ""
    if isinstance(config, PreferenceDataConfig):
        margin = 0.0 if config.margin_key is None else float(record.get(config.margin_key, "data.margin_key"))
        subset = "" if config.subset_key is None else str(record.get(config.subset_key, "data.subset_key"))
    return PreferencePair(preferred.token_ids, other.token_ids, margin, preferred.prompt_length, subset)


def _judged(record: Record, config: UnpairedDataConfig, encoder: Encoder) -> list[UnpairedExample]:
    if _is_pair(record, config):
        pair = _pair(record, config, encoder)
        sides = ((pair.chosen, True), (pair.rejected, False))
        return [UnpairedExample(token_ids, pair.prompt_length, desirable) for token_ids, desirable in sides]
    desirable = record.get(config.label_key, "data.label_key")
    if not isinstance(desirable, bool):
        raise UserError(
            f"{record.where}: {config.label_key!r} holds {type(desirable).__name__}, expected true or false: "
            "check the file or data.label_key"
        )
    if isinstance(record.fields.get(config.completion_key), list):
        prompt, completion = _last_answer(record, config.completion_key, "data.completion_key", config, encoder)
    else:
        prompt = Prompt(render(config.prompt_template, instruction(record, config.prompt_key, config)))
        completion = record.text(config.completion_key, "data.completion_key")
    (example,) = _examples(prompt, (completion,), config, encoder)
    return [UnpairedExample(example.token_ids, example.prompt_length, desirable)]


def _is_pair(record: Record, config: UnpairedDataConfig) -> bool:
    if config.format == "auto":
        return config.chosen_key in record.fields and config.label_key not in record.fields
    return config.format != "unpaired"


@dataclass(frozen=True)
class Prompt:
    """The text before an answer, with its template applied."""

    text: str
    by_chat_template: bool = False
    """Whether the text already contains the special tokens."""


def _examples(
    prompt: Prompt, responses: Sequence[str], config: SupervisedDataConfig, encoder: Encoder
) -> list[SFTExample]:
    """One example for each of ``responses`` after the prompt."""
    rendered = prompt.by_chat_template
    prompt_ids = encoder.rendered(prompt.text) if rendered else encoder.prompt(prompt.text)
    examples = []
    for response in responses:
        ids = encoder.response(prompt.text, prompt_ids, response, append_eos=config.append_eos, rendered=rendered)
        _check(response, len(prompt_ids) + len(ids), config.max_length)
        examples.append(SFTExample(prompt_ids + ids, len(prompt_ids)))
    return examples


def _two_answers(record: Record, config: PairDataConfig, encoder: Encoder) -> tuple[Prompt, str, str]:
    """Prompt, chosen and rejected."""
    sides = ((config.chosen_key, "data.chosen_key"), (config.rejected_key, "data.rejected_key"))
    if config.format != "hh" and all(isinstance(record.fields.get(key), list) for key, _ in sides):
        (prompt, chosen), (other_prompt, rejected) = (
            _last_answer(record, key, setting, config, encoder) for key, setting in sides
        )
        if prompt != other_prompt:
            raise Dropped("with differing prompts")
        return prompt, chosen, rejected
    chosen, rejected = (record.text(key, setting) for key, setting in sides)
    if config.format == "hh" or (config.format == "auto" and config.prompt_key not in record.fields):
        text, chosen, rejected = _hh_pair(chosen, rejected)
    else:
        text = instruction(record, config.prompt_key, config)
    return Prompt(render(config.prompt_template, text)), chosen, rejected


def _last_answer(
    record: Record, key: str, setting: str, config: PairDataConfig, encoder: Encoder
) -> tuple[Prompt, str]:
    """The conversation before the last message under ``key``, which the prompt key may hold, and that message."""
    messages = _messages(record, key, setting)
    if messages[0].get("role") == "assistant":
        before = record.get(config.prompt_key, "data.prompt_key")
        if isinstance(before, str):
            before = instruction(record, config.prompt_key, config)
            messages = [{"role": "user", "content": before}, *messages]
        else:
            messages = [*_messages(record, config.prompt_key, "data.prompt_key"), *messages]
    if messages[-1].get("role") != "assistant":
        raise Dropped("without an assistant's last turn")
    chat = partial(encoder.chat, tools=record.fields.get(TOOLS_KEY))
    prompt = chat(messages[:-1], add_generation_prompt=True)
    return Prompt(prompt, by_chat_template=True), _rendered_answer(prompt, messages, chat)


def _messages(record: Record, key: str, setting: str) -> list[dict[str, Any]]:
    messages = record.get(key, setting)
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise UserError(f"{record.where}: {key!r} is not a list of messages: check {setting}")
    return messages


def _rendered_answer(prompt: str, messages: list[dict[str, Any]], chat: Callable[..., str]) -> str:
    """The last of ``messages`` as the chat template writes it after ``prompt``, the rendering of the earlier messages."""
    answer = messages[-1]
    if not str(answer.get("content") or "").strip() and not answer.get("tool_calls"):
        raise Dropped("with an empty response")
    through = chat(messages, add_generation_prompt=False)
    if not through.startswith(prompt):
        raise Dropped("rendered differently with an answer than without")
    return through[len(prompt) :]


def _hh_pair(chosen: str, rejected: str) -> tuple[str, str, str]:
    preferred, other = split_last_answer(chosen), split_last_answer(rejected)
    if preferred is None or other is None:
        raise Dropped("without an assistant turn")
    if preferred[0] != other[0]:
        raise Dropped("with differing prompts")
    return preferred[0], preferred[1], other[1]


def _check(response: str, length: int, max_length: int) -> None:
    if not response.strip():
        raise Dropped("with an empty response")
    if length < 2:
        raise Dropped("with nothing to learn from")
    if length > max_length:
        raise Dropped(f"longer than {max_length} tokens")

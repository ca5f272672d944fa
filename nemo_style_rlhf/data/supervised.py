"""Rows of the supervised stages as token ids."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.hh import split_last_answer
from nemo_style_rlhf.data.records import DropReport, Record, read_records
from nemo_style_rlhf.data.templates import render
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.supervised import PreferenceDataConfig, SFTDataConfig

Row = TypeVar("Row")
ADVICE = "check the file, or raise data.max_length"


@dataclass(frozen=True)
class SFTExample:
    """One text to imitate."""

    token_ids: list[int]
    prompt_length: int
    """So many tokens at the beginning are read, not learned; 0 in plain text."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt, prompt included in both."""

    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0

    def __len__(self) -> int:
        return max(len(self.chosen), len(self.rejected))


class Dropped(Exception):
    """A row that cannot be used, with the reason for the report."""


def load_sft(
    path: str, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[SFTExample], DropReport]:
    """The usable rows of one file, in its order, and a report on the others.

    Raises:
        UserError: missing file, broken JSON, missing key, empty data set, or nothing left.
    """
    encoder = Encoder(tokenizer, chat_template=config.chat_template)
    return _usable(path, lambda record: _sft_example(record, config, encoder))


def load_pairs(
    path: str, config: PreferenceDataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[PreferencePair], DropReport]:
    """The usable pairs of one file, in its order, and a report on the others: too long ones, equal ones, empty answers,
    HH transcripts whose prompts differ.

    Raises:
        UserError: as :func:`load_sft`.
    """
    encoder = Encoder(tokenizer)
    return _usable(path, lambda record: _pair(record, config, encoder))


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
        prompt, response = _last_answer(record, config, encoder)
        prompt_ids = encoder.rendered(prompt)
        ids = encoder.response(prompt, prompt_ids, response, append_eos=config.append_eos, rendered=True)
    else:
        prompt = render(config.prompt_template, record.text(config.prompt_key, "data.prompt_key"))
        response = record.text(config.response_key, "data.response_key")
        prompt_ids = encoder.prompt(prompt)
        ids = encoder.response(prompt, prompt_ids, response, append_eos=config.append_eos)
    _check(response, len(prompt_ids) + len(ids), config.max_length)
    return SFTExample(prompt_ids + ids, len(prompt_ids))


def _sft_format(record: Record, config: SFTDataConfig) -> str:
    if config.messages_key in record.fields:
        return "messages"
    if config.text_key in record.fields and config.response_key not in record.fields:
        return "text"
    return "prompt_response"


def _last_answer(record: Record, config: SFTDataConfig, encoder: Encoder) -> tuple[str, str]:
    """The rendered conversation, split before its last message."""
    messages = record.get(config.messages_key, "data.messages_key")
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{record.where}: {config.messages_key!r} is not a list of messages: check data.messages_key")
    if messages[-1].get("role") != "assistant":
        raise Dropped("without an assistant's last turn")
    prompt = encoder.chat(messages[:-1], add_generation_prompt=True)
    whole = encoder.chat(messages, add_generation_prompt=False)
    if not whole.startswith(prompt):
        raise Dropped("rendered differently with the answer than without")
    return prompt, whole[len(prompt) :]


def _pair(record: Record, config: PreferenceDataConfig, encoder: Encoder) -> PreferencePair:
    chosen = record.text(config.chosen_key, "data.chosen_key")
    rejected = record.text(config.rejected_key, "data.rejected_key")
    if config.format == "hh" or (config.format == "auto" and config.prompt_key not in record.fields):
        prompt, chosen, rejected = _hh_pair(chosen, rejected)
    else:
        prompt = record.text(config.prompt_key, "data.prompt_key")
    if chosen == rejected:
        raise Dropped("with equal responses")
    prompt = render(config.prompt_template, prompt)
    prompt_ids = encoder.prompt(prompt)
    sides = []
    for response in (chosen, rejected):
        ids = encoder.response(prompt, prompt_ids, response, append_eos=config.append_eos)
        _check(response, len(prompt_ids) + len(ids), config.max_length)
        sides.append(prompt_ids + ids)
    margin = 0.0 if config.margin_key is None else float(record.get(config.margin_key, "data.margin_key"))
    return PreferencePair(sides[0], sides[1], margin)


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
    if length > max_length:
        raise Dropped(f"longer than {max_length} tokens")

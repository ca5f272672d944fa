"""Turns rows of the supervised stages into token ids."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from nemo_style_rlhf.data import layouts
from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.examples import Conversation, PreferencePair, SFTExample, UnpairedExample
from nemo_style_rlhf.data.records import Dropped, DropReport, Record, usable
from nemo_style_rlhf.data.sources import described, read_records
from nemo_style_rlhf.data.template_files import render
from nemo_style_rlhf.data.turns import (
    CONVERSATION_COLUMNS,
    greeting,
    is_conversation,
    require_question,
    tools,
    unpacked,
)
from nemo_style_rlhf.schema.chat import Message, plain_text, reasoning_of
from nemo_style_rlhf.schema.model_files import rows_of
from nemo_style_rlhf.schema.sources import Sources
from nemo_style_rlhf.schema.supervised import (
    PairDataConfig,
    PreferenceDataConfig,
    SFTDataConfig,
    SupervisedDataConfig,
    UnpairedDataConfig,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = TypeVar("Row")
OPENED, CLOSED = "<think>", "</think>"
"""Tags of reasoning: DeepSeek's templates end a prompt with the first, and leave all reasoning out of the answers."""


def load_sft(
    sources: Sources, config: SFTDataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[list[SFTExample], DropReport]:
    """The examples in the usable rows of a source, in its order, and a report on the others. A conversation of several answers is
    one example, or several if the chat template writes an answer differently once something follows it.

    Raises:
        UserError: the source is missing or has broken JSON, or no row is left.
    """
    read = sft_reader((), config, encoder_of(tokenizer, config))
    rows, report = _kept(usable(read_records(sources), read, described(sources)))
    return [example for examples in rows for example in examples], report


def load_pairs(
    sources: Sources, config: PairDataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[list[PreferencePair], DropReport]:
    """The usable pairs of one source, in its order, and a report on the others: too long pairs, equal answers, empty answers,
    transcripts or conversations whose prompts differ.

    Raises:
        UserError: see :func:`load_sft`.
    """
    records = list(read_records(sources))
    read = pair_reader(
        records,
        config,
        encoder_of(tokenizer, config),
    )
    return _kept(usable(records, read, described(sources)))


def load_unpaired(
    sources: Sources, config: UnpairedDataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[list[UnpairedExample], DropReport]:
    """The usable judged answers of one source, in its order, and a report on the other rows. A pair becomes two answers, the
    desirable one first; if one of them is unusable, both are dropped.

    Raises:
        UserError: see :func:`load_sft`; or a label is neither true nor false.
    """
    records = list(read_records(sources))
    read = unpaired_reader(
        records,
        config,
        encoder_of(tokenizer, config),
    )
    rows, report = _kept(usable(records, read, described(sources)))
    return [example for examples in rows for example in examples], report


def encoder_of(tokenizer: "PreTrainedTokenizerBase", config: SupervisedDataConfig) -> Encoder:
    return Encoder(
        tokenizer, chat_template=config.chat_template, today=config.today, rows=rows_of(tokenizer)
    )  # fmt: skip


def _kept(loaded: tuple[list[Row], DropReport]) -> tuple[list[Row], DropReport]:
    loaded[1].require_kept()
    return loaded


def sft_reader(
    _: Sequence[Record], config: SFTDataConfig, encoder: Encoder
) -> Callable[[Record], Sequence[SFTExample]]:
    """A function that makes the examples of a row, see :func:`load_sft`; rows do not depend on each other."""
    return lambda record: _sft_examples(record, config, encoder)


def pair_reader(
    records: Sequence[Record], config: PairDataConfig, encoder: Encoder
) -> Callable[[Record], PreferencePair]:
    """A function that makes a pair of one of ``records``, see :func:`load_pairs`."""
    unprompted = layouts.Unprompted.of(records, config)
    return lambda record: _pair(record, config, encoder, unprompted)


def unpaired_reader(
    records: Sequence[Record], config: UnpairedDataConfig, encoder: Encoder
) -> Callable[[Record], list[UnpairedExample]]:
    """A function that makes judged answers of one of ``records``, see :func:`load_unpaired`."""
    unprompted = layouts.Unprompted.of(records, config)
    return lambda record: _judged(record, config, encoder, unprompted)


def _sft_examples(record: Record, config: SFTDataConfig, encoder: Encoder) -> Sequence[SFTExample]:
    prompt_key, _ = _prompt_and_response(record, config)
    record = unpacked(record, record.column(config.messages_key, CONVERSATION_COLUMNS), prompt_key)
    layout = _sft_format(record, config) if config.format == "auto" else config.format
    if layout == "text":
        if config.apply_chat_template:
            raise Dropped("of plain text, which no chat template takes")
        response = record.text(config.text_key, "data.text_key")
        ids = encoder.response("", [], response, append_eos=config.append_eos)
        _check(response, len(ids), config.max_length)
        return [SFTExample(ids, 0)]
    if layout == "messages":
        key = record.column(config.messages_key, CONVERSATION_COLUMNS)
        messages = layouts.conversation(record, key, "data.messages_key", config)
        require_question(messages)
        return _conversation(messages, greeting(messages), record, config, encoder)
    key, answer = _prompt_and_response(record, config)
    if is_conversation(record.fields.get(answer)):
        turns = layouts.messages(record, answer, "data.response_key")
        prompt = layouts.as_messages(layouts.open_prompt(record, key, config), record, config)
        return _conversation([*prompt, *turns], len(prompt), record, config, encoder)
    before, response = layouts.open_prompt(record, key, config), record.text(answer, "data.response_key")
    if isinstance(before, str):
        return _examples(_Prompt(render(config.prompt_template, before)), (response,), config, encoder)
    return _conversation([*before, layouts.said("assistant", response)], len(before), record, config, encoder)


def _prompt_and_response(record: Record, config: SFTDataConfig) -> tuple[str, str]:
    """The columns of the prompt and of the response."""
    return (
        record.column(config.prompt_key, layouts.PROMPT_COLUMNS),
        record.column(config.response_key, layouts.ANSWER_COLUMNS),
    )


def _sft_format(record: Record, config: SFTDataConfig) -> str:
    conversation = record.column(config.messages_key, CONVERSATION_COLUMNS)
    prompt, response = _prompt_and_response(record, config)
    if record.has(conversation):
        return "messages"
    if prompt in record.fields and response in record.fields:
        return "prompt_response"
    if record.has(config.text_key) and response not in record.fields:
        return "text"
    if prompt not in record.fields:  # a null is the fault of a row whose layout is known
        return next(
            (name for key, name in ((conversation, "messages"), (config.text_key, "text")) if key in record.fields),
            "prompt_response",
        )
    return "prompt_response"


def _conversation(
    messages: list[Message], first: int, record: Record, config: SFTDataConfig, encoder: Encoder
) -> list[Conversation]:
    """Tokens of the rendered conversation, turn by turn. Each answer has the tokens that follow its prompt at inference. If the
    prompt of an answer has the answers before it as they were learned, they are one example. A template that leaves the reasoning
    of earlier answers out, or closes them differently, begins another.

    Args:
        first: index of the first message that may be a learned answer.
    """
    turns = [index for index, message in enumerate(messages) if index >= first and message["role"] == "assistant"]
    if not turns or turns[-1] != len(messages) - 1:
        raise Dropped("without an assistant's last turn")
    chat = partial(encoder.whole_chat, tools=tools(record))
    text, examples = "", list[list[tuple[str, str]]]()
    for turn in turns if config.learn == "all_answers" else turns[-1:]:
        prompt = chat(messages[:turn], add_generation_prompt=True)
        answer = _rendered_answer(prompt, messages[: turn + 1], chat)
        if not examples or not prompt.startswith(text):
            examples.append([])
        examples[-1].append((prompt, answer))
        text = prompt + answer
    return [_tokenized(answers, config, encoder) for answers in examples]


def _tokenized(answers: list[tuple[str, str]], config: SFTDataConfig, encoder: Encoder) -> Conversation:
    """Tokenize pairs of the text before an answer and the answer as one example; each text begins with the pair before it."""
    text, ids, read = "", list[int](), list[tuple[int, int]]()
    for number, (prompt, answer) in enumerate(answers, start=1):
        start = len(ids)
        ids += encoder.response(text, ids, prompt[len(text) :], append_eos=False, rendered=True)
        read.append((start, len(ids)))
        text, last = prompt + answer, number == len(answers)
        ids += encoder.response(prompt, ids, answer, append_eos=config.append_eos and last, rendered=True)
    _check(answers[-1][1], len(ids), config.max_length)
    return Conversation(ids, read[0][1], read[1:])


def _pair(record: Record, config: PairDataConfig, encoder: Encoder, unprompted: layouts.Unprompted) -> PreferencePair:
    record = unpacked(record, config.chosen_key, config.rejected_key, layouts.prompt_column(record, config))
    sides = layouts.read_pair(record, config, unprompted)
    margin, subset = 0.0, ""
    if isinstance(config, PreferenceDataConfig):
        margin = 0.0 if config.margin_key is None else _margin(record, config.margin_key)
        subset = "" if config.subset_key is None else str(record.get(config.subset_key, "data.subset_key"))
    (prompt, chosen), (other_prompt, rejected) = (_rendered(side, record, config, encoder) for side in sides)
    if prompt != other_prompt:
        raise Dropped("with differing prompts")
    if chosen == rejected:
        raise Dropped("with equal responses")
    preferred, other = _examples(prompt, (chosen, rejected), config, encoder)
    return PreferencePair(preferred.token_ids, other.token_ids, margin, preferred.prompt_length, subset)


def _margin(record: Record, key: str) -> float:
    margin = record.get(key, "data.margin_key")
    if not isinstance(margin, int | float) or not math.isfinite(margin):
        raise record.unexpected(key, margin, "a number", "data.margin_key")
    return float(margin)


def _judged(
    record: Record, config: UnpairedDataConfig, encoder: Encoder, unprompted: layouts.Unprompted
) -> list[UnpairedExample]:
    if layouts.is_pair(record, config):
        pair = _pair(record, config, encoder, unprompted)
        sides = ((pair.chosen, True), (pair.rejected, False))
        return [UnpairedExample(token_ids, pair.prompt_length, desirable) for token_ids, desirable in sides]
    desirable = layouts.read_label(record, config.label_key)
    record = unpacked(record, layouts.prompt_column(record, config))
    prompt, completion = _rendered(layouts.read_judged(record, config), record, config, encoder)
    (example,) = _examples(prompt, (completion,), config, encoder)
    return [UnpairedExample(example.token_ids, example.prompt_length, desirable)]


@dataclass(frozen=True)
class _Prompt:
    """The text before an answer, with its template applied."""

    text: str
    by_chat_template: bool = False
    """True if the text already contains the special tokens."""


def _rendered(
    answered: layouts.Answered, record: Record, config: SupervisedDataConfig, encoder: Encoder
) -> tuple[_Prompt, str]:
    """The text of the prompt, and the text of the answer after it."""
    prompt, answer = answered
    if isinstance(prompt, str):
        assert isinstance(answer, str)
        return _Prompt(render(config.prompt_template, prompt)), answer
    assert isinstance(answer, dict)
    chat = partial(encoder.whole_chat, tools=tools(record))
    text = chat(prompt, add_generation_prompt=True)
    return _Prompt(text, by_chat_template=True), _rendered_answer(text, [*prompt, answer], chat)


def _examples(
    prompt: _Prompt, responses: Sequence[str], config: SupervisedDataConfig, encoder: Encoder
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


def _rendered_answer(prompt: str, messages: list[Message], chat: Callable[..., str]) -> str:
    """The last of ``messages`` as the chat template writes it after ``prompt``, the rendering of the earlier messages."""
    layouts.require_content(messages[-1])
    through = chat(messages, add_generation_prompt=False)
    if not through.startswith(prompt):
        shared = prompt.rstrip()  # some templates then close at once the reasoning that their prompt opens
        if through.startswith(shared) and through[len(shared) :].lstrip() == through[len(shared) :]:
            return _with_reasoning(messages[-1], through[len(shared) :])
        before_reasoning = shared.removesuffix(OPENED)
        if before_reasoning != shared and through.startswith(before_reasoning):
            reasoning = reasoning_of(messages[-1]) or _opened_in(plain_text(messages[-1]))
            return f"{reasoning.strip()}\n{CLOSED}\n\n{through[len(before_reasoning) :]}"
        raise Dropped(
            "rendered differently with an answer than without",
            advice="set data.chat_template to a template that writes an answer right after its generation prompt",
        )
    return _with_reasoning(messages[-1], through[len(prompt) :])


def _opened_in(content: str) -> str:
    """Reasoning that stands in an answer's text, before it."""
    before, closed, _ = content.partition(CLOSED)
    return before.strip().removeprefix(OPENED) if closed else ""


def _with_reasoning(message: Message, answer: str) -> str:
    """``answer``, checked to hold the message's reasoning."""
    reasoning = reasoning_of(message)
    if reasoning.strip() not in answer:
        raise Dropped(
            "with reasoning that the chat template does not write",
            advice="set data.chat_template to one that writes it, or take the reasoning out of the rows",
        )
    return answer


def _check(response: str, length: int, max_length: int) -> None:
    if not response.strip():
        raise Dropped("with an empty response")
    if length < 2:
        raise Dropped("with nothing to learn from")
    if length > max_length:
        raise Dropped(f"longer than {max_length} tokens", advice="raise data.max_length")

"""Finds prompts and answers in rows, in the layouts in which they are published, before anything is tokenized.

A prompt is a text, or with a chat template a list of messages. An answer is a text or a message.
"""

import enum
from collections.abc import Iterable
from typing import Any

from nemo_style_rlhf.data import hh
from nemo_style_rlhf.data.records import Dropped, Record
from nemo_style_rlhf.data.turns import (
    BEFORE_THE_USER,
    CONVERSATION_COLUMNS,
    OF_AN_ANSWER,
    is_conversation,
    messages,
    require_known_speaker,
    require_question,
    said,
    unpacked,
)
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.chat import Message, plain_text
from nemo_style_rlhf.schema.data import PromptTemplateConfig
from nemo_style_rlhf.schema.supervised import PairDataConfig, UnpairedDataConfig

Prompt = str | list[Message]
Answer = str | Message
Answered = tuple[Prompt, Answer]
PROMPT_COLUMNS = ("prompt", "instruction")
"""Columns of prompts where no setting names one; the second is Alpaca's, whose `input` continues it."""
ANSWER_COLUMNS = ("response", "completion", "output")
"""Columns of answers in SFT where no setting names one."""
COMPLETION_COLUMNS = ("completion", "response", "output")
"""Columns of answers in KTO where no setting names one."""
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""KTO reads these texts, and what prints like them, as labels."""


def prompt_column(record: Record, config: PromptTemplateConfig) -> str:
    """The column of the prompt; it may hold a conversation."""
    return record.column(config.prompt_key, (*PROMPT_COLUMNS, *CONVERSATION_COLUMNS))


def read_prompt(record: Record, key: str, config: PromptTemplateConfig) -> Prompt:
    """The prompt under ``key``: messages if it is a conversation, or a text that becomes the user's message.

    Raises:
        Dropped: it is neither a text nor a conversation.
    """
    if is_conversation(record.fields.get(key)):
        return conversation(record, key, "data.prompt_key", config)
    text = instruction(record, key, config)
    return as_messages(text, record, config) if config.apply_chat_template else text


def open_prompt(record: Record, key: str, config: PromptTemplateConfig) -> Prompt:
    """:func:`read_prompt` for an answer in another column.

    Raises:
        Dropped: the prompt ends with an answer of its own, or its last role does not tell.
    """
    prompt = read_prompt(record, key, config)
    if isinstance(prompt, list):
        require_known_speaker(prompt, record, key)
        if prompt[-1]["role"] == "assistant":
            raise Dropped(f"whose {key!r} already ends with an answer")
    return prompt


def conversation(record: Record, key: str, setting: str, config: PromptTemplateConfig) -> list[Message]:
    """The messages under ``key``, after the row's system prompt."""
    return with_system(record, messages(record, key, setting), config)


def as_messages(prompt: Prompt, record: Record, config: PromptTemplateConfig) -> list[Message]:
    """``prompt`` itself, or its text as the user's message after the row's system prompt."""
    return with_system(record, [said("user", prompt)], config) if isinstance(prompt, str) else prompt


def with_system(record: Record, turns: list[Message], config: PromptTemplateConfig) -> list[Message]:
    """``turns`` after the row's system prompt, if there is one and they have none of their own.

    Raises:
        Dropped: ``data.system_key`` names a column that is missing or holds no text.
    """
    if turns[0]["role"] in BEFORE_THE_USER:
        return turns
    system = record.fields.get("system")
    if config.system_key is not None and (system := record.get(config.system_key, "data.system_key")) is not None:
        system = record.text(config.system_key, "data.system_key")
    return [said("system", system), *turns] if isinstance(system, str) and system.strip() else turns


def input_column(record: Record, key: str, config: PromptTemplateConfig) -> str | None:
    """The column whose text continues the prompt under ``key``: the configured one, or Alpaca's, if nothing else reads it."""
    read = {value for name, value in vars(config).items() if name.endswith("_key")}
    alpaca = key == "instruction" and "input" in record.fields and "input" not in read
    return config.input_key or ("input" if alpaca else None)


def instruction(record: Record, key: str, config: PromptTemplateConfig) -> str:
    """The text under ``key``, followed by a blank line and the text of :func:`input_column` if that is not empty.

    Raises:
        Dropped: one of the two is missing or not text.
    """
    text, column = record.text(key, "data.prompt_key"), input_column(record, key, config)
    if column is None or record.get(column, "data.input_key") is None:
        return text
    given = record.text(column, "data.input_key")
    return f"{text}\n\n{given}" if given.strip() else text


def read_answered(record: Record, key: str, setting: str, config: PromptTemplateConfig) -> Answered:
    """A prompt, and the answer under ``key``: a text, or the last turn of a conversation.

    A conversation that consists of only an answer follows the row's prompt; any other conversation is complete.

    Raises:
        Dropped: a conversation does not end with the assistant, begins with its answer, or does not repeat its prompt; or
            the prompt is not open, see :func:`open_prompt`.
    """
    column = prompt_column(record, config)
    if not is_conversation(record.fields.get(key)):
        prompt, answer = open_prompt(record, column, config), record.text(key, setting)
        return prompt, (answer if isinstance(prompt, str) else said("assistant", answer))
    turns = messages(record, key, setting)
    if column != key and all(turn["role"] in OF_AN_ANSWER for turn in turns):
        before = as_messages(open_prompt(record, column, config), record, config)
        return [*before, *turns[:-1]], require_answer(turns)
    listed = is_conversation(record.fields.get(column)) and column not in (key, *CONVERSATION_COLUMNS)
    if listed and not _begins(turns, messages(record, column, "data.prompt_key")):
        raise Dropped(f"whose {key!r} does not go on with its {column!r}")
    require_answer(turns)
    require_question(turns)
    return with_system(record, turns[:-1], config), turns[-1]


def _begins(turns: list[Message], before: list[Message]) -> bool:
    def spoken(messages: list[Message]) -> list[tuple[Any, Any]]:
        return [(message["role"], message.get("content")) for message in messages]

    return spoken(turns)[: len(before)] == spoken(before)


def require_answer(turns: list[Message]) -> Message:
    """The last of ``turns``.

    Raises:
        Dropped: it is not the assistant's, or has neither text nor tool calls.
    """
    if turns[-1]["role"] != "assistant":
        raise Dropped("without an assistant's last turn")
    require_content(turns[-1])
    return turns[-1]


def require_content(answer: Message) -> None:
    """Check that an answer says or calls something.

    Raises:
        Dropped: it has neither text nor tool calls.
    """
    if not plain_text(answer).strip() and not answer.get("tool_calls"):
        raise Dropped("with an empty response")


def prompt_layout(record: Record, config: PairDataConfig) -> tuple[str, str] | None:
    """data.format and data.prompt_key with which a PPO run reads the prompts of rows like ``record``. None if only its two texts
    tell where the prompt ends."""
    key = prompt_column(record, config)
    key = key if record.has(key) else config.chosen_key
    record = unpacked(record, key)
    if is_conversation(record.fields.get(key)):
        return "messages", key
    if hh.is_transcript(str(record.fields.get(config.chosen_key))) and (
        config.format == "hh" or key == config.chosen_key
    ):
        return "hh", config.chosen_key
    return None if key == config.chosen_key else ("text", key)


class Unprompted(enum.Enum):
    """A way to read two texts without a prompt's column; the rows of their source decide."""

    FAULTY = "without the prompt that other rows have"
    TRANSCRIPTS = "Anthropic-HH transcripts"
    SHARED_BEGINNING = "texts that begin with their prompt"

    @staticmethod
    def of(records: Iterable[Record], config: PairDataConfig) -> "Unprompted":
        lead = 0  # of transcripts over other texts
        for record in records:
            if prompt_column(record, config) in record.fields:
                return Unprompted.FAULTY
            lead += 1 if hh.is_transcript(str(record.fields.get(config.chosen_key))) else -1
        return Unprompted.TRANSCRIPTS if lead > 0 else Unprompted.SHARED_BEGINNING


def read_pair(record: Record, config: PairDataConfig, unprompted: Unprompted) -> tuple[Answered, Answered]:
    """The chosen and the rejected answer, each with its prompt.

    Raises:
        Dropped: see :func:`read_answered`; or two texts share no prompt.
    """
    sides = ((config.chosen_key, "data.chosen_key"), (config.rejected_key, "data.rejected_key"))
    separate = record.has(prompt_column(record, config)) or any(
        is_conversation(record.fields.get(key)) for key, _ in sides
    )
    if config.format != "hh" and separate:
        chosen, rejected = (read_answered(record, key, setting, config) for key, setting in sides)
        return chosen, rejected
    texts = [record.text(key, setting) for key, setting in sides]
    of_hh = config.format == "hh" or unprompted is Unprompted.TRANSCRIPTS
    if of_hh or any(hh.is_transcript(text) for text in texts):
        chosen, rejected = (_of_transcript(text, record, config) for text in texts)
        return chosen, rejected
    if config.prompt_key is not None or unprompted is Unprompted.FAULTY:
        record.text(prompt_column(record, config), "data.prompt_key")  # which drops the row
    shared = shared_beginning(*texts)
    if not shared.strip():
        raise Dropped("without a beginning that both texts share")
    prompt = as_messages(shared, record, config) if config.apply_chat_template else shared
    answers = [text[len(shared) :] for text in texts]
    chosen, rejected = (
        (prompt, answer if isinstance(prompt, str) else said("assistant", answer)) for answer in answers
    )
    return chosen, rejected


def _of_transcript(transcript: str, record: Record, config: PromptTemplateConfig) -> Answered:
    if (found := hh.split_last_answer(transcript)) is None:
        raise Dropped("without an assistant turn")
    prompt, answer = found
    if not config.apply_chat_template:
        return prompt, answer
    return with_system(record, hh.prompt_messages(prompt), config), said("assistant", answer.strip())


def shared_beginning(one: str, other: str) -> str:
    """The words with which both texts begin, without the white space before the first word that differs."""
    length = next((at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))
    while length and not all(text[length : length + 1].isspace() for text in (one, other)):
        length -= 1
    return one[:length].rstrip()


def is_pair(record: Record, config: UnpairedDataConfig) -> bool:
    """True if a row of KTO is a pair. A pair counts as one desirable and one undesirable answer."""
    if config.format == "auto":
        return record.has(config.chosen_key) and not record.has(config.label_key)
    return config.format != "unpaired"


def read_judged(record: Record, config: UnpairedDataConfig) -> Answered:
    """A prompt and its judged completion; without a completion's column, the last turn of a conversation.

    Raises:
        Dropped: see :func:`read_answered`.
    """
    key, setting = record.column(config.completion_key, COMPLETION_COLUMNS), "data.completion_key"
    column = prompt_column(record, config)
    if config.completion_key is None and not record.has(key) and column in CONVERSATION_COLUMNS:
        key, setting = column, "data.prompt_key"
    return read_answered(record, key, setting, config)


def read_label(record: Record, key: str) -> bool:
    """True if a completion is desirable. Labels are true or false, 1 or 0, or one of these as a text.

    Raises:
        Dropped: the label is missing.
        UserError: the label is of another scale, with unknown meaning.
    """
    label = record.get(key, "data.label_key")
    if label is None:
        raise record.unexpected(key, label, "true or false", "data.label_key")
    desirable = LABELS.get(str(label).strip().lower())
    if desirable is None:
        raise UserError(
            f"{record.where}: {key!r} holds {label!r}, expected true or false, or 1 or 0: check the file or data.label_key"
        )
    return desirable

"""Anthropic-HH transcripts: one string, in which "\\n\\nHuman:" and "\\n\\nAssistant:" open the turns."""

import re

from nemo_style_rlhf.data.records import Dropped
from nemo_style_rlhf.data.turns import said
from nemo_style_rlhf.schema.chat import Message

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_OPENS_TURN = re.compile(f"({HUMAN}|{ASSISTANT})")


def is_transcript(text: str) -> bool:
    return HUMAN in text or ASSISTANT in text


def cut_last_answer(transcript: str) -> str | None:
    """``transcript`` up to and including the last "\\n\\nAssistant:"; None if it has no assistant turn."""
    cut = transcript.rfind(ASSISTANT)
    return None if cut < 0 else transcript[: cut + len(ASSISTANT)]


def split_last_answer(transcript: str) -> tuple[str, str] | None:
    """Prompt (ending in "\\n\\nAssistant:") and the last answer; None without an assistant turn."""
    prompt = cut_last_answer(transcript)
    return None if prompt is None else (prompt, transcript[len(prompt) :])


def prompt_messages(prompt: str) -> list[Message]:
    """The turns of ``prompt`` up to its final "\\n\\nAssistant:", for a chat template. Text before the first is a system turn.

    Raises:
        Dropped: no turn precedes the answer.
    """
    before, *turns = _OPENS_TURN.split(prompt)
    roles = {HUMAN: "user", ASSISTANT: "assistant"}
    spoken = [said(roles[mark], text.strip()) for mark, text in zip(turns[::2], turns[1::2], strict=True)]
    if len(spoken) < 2:
        raise Dropped("without a turn before the answer")
    return [*([said("system", before.strip())] if before.strip() else []), *spoken[:-1]]

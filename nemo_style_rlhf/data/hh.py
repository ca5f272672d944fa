"""Anthropic-HH transcripts: one string, turns opened by "\\n\\nHuman:" and "\\n\\nAssistant:"."""

ASSISTANT = "\n\nAssistant:"


def cut_last_answer(transcript: str) -> str | None:
    """``transcript`` up to and including the last "\\n\\nAssistant:"; None where no assistant turn is in it."""
    cut = transcript.rfind(ASSISTANT)
    return None if cut < 0 else transcript[: cut + len(ASSISTANT)]


def split_last_answer(transcript: str) -> tuple[str, str] | None:
    """Prompt (ending in "\\n\\nAssistant:") and the last answer; None where no assistant turn is in it."""
    prompt = cut_last_answer(transcript)
    return None if prompt is None else (prompt, transcript[len(prompt) :])

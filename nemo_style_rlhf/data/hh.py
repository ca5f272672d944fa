"""Anthropic-HH transcripts: one string, in which "\\n\\nHuman:" and "\\n\\nAssistant:" open the turns."""

ASSISTANT = "\n\nAssistant:"


def cut_last_answer(transcript: str) -> str | None:
    """``transcript`` up to and including the last "\\n\\nAssistant:"; None if it has no assistant turn."""
    cut = transcript.rfind(ASSISTANT)
    return None if cut < 0 else transcript[: cut + len(ASSISTANT)]


def split_last_answer(transcript: str) -> tuple[str, str] | None:
    """Prompt (ending in "\\n\\nAssistant:") and the last answer; None if there is no assistant turn."""
    prompt = cut_last_answer(transcript)
    return None if prompt is None else (prompt, transcript[len(prompt) :])

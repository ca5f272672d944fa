"""Reads the text of a prompt from a row."""

from nemo_style_rlhf.data.records import Record
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.data import PromptTemplateConfig


def instruction(record: Record, key: str, config: PromptTemplateConfig) -> str:
    """The text under ``key``, followed by a blank line and the text under ``config.input_key`` if that is not empty.

    Raises:
        UserError: one of the two is missing or no text, or the row looks like Alpaca's and its `input` would be ignored.
    """
    text = record.text(key, "data.prompt_key")
    if config.input_key is None:
        _refuse_unread_input(record, key, config)
        return text
    if record.get(config.input_key, "data.input_key") is None:
        return text
    given = record.text(config.input_key, "data.input_key")
    return f"{text}\n\n{given}" if given.strip() else text


def _refuse_unread_input(record: Record, key: str, config: PromptTemplateConfig) -> None:
    given = record.fields.get("input")
    read = {value for name, value in vars(config).items() if name.endswith("_key")}
    if key == "instruction" and "input" not in read and isinstance(given, str) and given.strip():
        raise UserError(
            f"{record.where} has an 'input' beside its 'instruction' that nothing reads: set data.input_key=input to join "
            "them, or rename that column to leave it out"
        )

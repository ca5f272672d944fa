"""Prompt and chat templates, and the note next to a trained model about its templates.

A policy that was fine-tuned on "Question: {prompt}\\nAnswer:" and then sees bare prompts still runs, but is silently worse. SFT
therefore writes ``prompt_template.json`` next to the weights, and PPO compares digests before it starts.
"""

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.data import PromptTemplateConfig
from nemo_style_rlhf.schema.model_files import stop_ids
from nemo_style_rlhf.schema.templates import PLACEHOLDER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
TEMPLATE_FILE = "prompt_template.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
"""File in which transformers keeps a tokenizer's chat template; a tokenizer with several has a folder for the others."""
MORE_CHAT_TEMPLATES = "additional_chat_templates"


def render(template: str | None, prompt: str) -> str:
    """Insert ``prompt`` into ``template``; braces in the prompt stay as they are."""
    return prompt if template is None else template.replace(PLACEHOLDER, prompt)


def digest(template: str | None) -> str | None:
    """SHA-256 of a template's text; None without a template."""
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()


def describe(
    template: str | None, tokenizer: "PreTrainedTokenizerBase", chat_template: str | None = None
) -> dict[str, Any]:
    """The note: a template, and the digests to compare; ``chat_template`` overrides the tokenizer's."""
    if chat_template is None and isinstance(tokenizer.chat_template, str):
        chat_template = tokenizer.chat_template
    if chat_template is not None:  # line breaks as they are read back from a file; Jinja treats all alike
        chat_template = chat_template.replace("\r\n", "\n").replace("\r", "\n")
    return {"template": template, "template_sha256": digest(template), "chat_template_sha256": digest(chat_template)}


def write_template(
    model_dir: Path,
    template: str | None,
    tokenizer: "PreTrainedTokenizerBase",
    chat_template: str | None = None,
    *,
    append_eos: bool,
) -> None:
    """Write a note in ``model_dir`` about the templates of the model's training, and how its responses ended.

    ``chat_template``, if given, becomes the chat template of the tokenizer in ``model_dir``.
    """
    stops = sorted(stop_ids(tokenizer))
    note = {**describe(template, tokenizer, chat_template), "append_eos": append_eos, "stop_token_ids": stops}
    (model_dir / TEMPLATE_FILE).write_text(json.dumps(note, indent=2) + "\n")
    if chat_template is not None:
        (model_dir / CHAT_TEMPLATE_FILE).write_text(chat_template, encoding="utf-8")
        shutil.rmtree(model_dir / MORE_CHAT_TEMPLATES, ignore_errors=True)


def read_template(model_dir: str) -> dict[str, Any]:
    """The note of :func:`write_template` in ``model_dir``; empty for a model that was not trained with this package."""
    note = Path(model_dir) / TEMPLATE_FILE
    return json.loads(note.read_text()) if note.is_file() else {}


def log_date(data: PromptTemplateConfig, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Log the date that the chat template gets, if it asks for one."""
    if Encoder(tokenizer, chat_template=data.chat_template).writes_a_date:
        log.info("the chat template asks for the date: data.today=%s", data.today)


def check_template(model_dir: str, data: PromptTemplateConfig, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Compare this run's templates with the templates that ``model_dir`` was trained with, if it has a note.

    If they differ and ``data.on_template_mismatch`` is ``warn``, the difference is logged.

    Raises:
        UserError: they differ and ``data.on_template_mismatch`` is ``refuse``.
    """
    template = data.prompt_template
    trained, given = read_template(model_dir), describe(template, tokenizer, data.chat_template)
    if not trained:
        return
    if trained["template_sha256"] != given["template_sha256"]:
        difference = (
            f"data.prompt_template is {template!r} but {model_dir} was trained with {trained['template']!r}: "
            "set data.prompt_template to that"
        )
    elif trained["chat_template_sha256"] != given["chat_template_sha256"]:
        difference = (
            f"the chat template (sha256 {_short(given['chat_template_sha256'])}) is not the one {model_dir} was "
            f"trained with (sha256 {_short(trained['chat_template_sha256'])}): use that model's own, data.chat_template=null, "
            "or where its tokenizer has none data.chat_template=@file with that template"
        )
    else:
        return
    _refuse_or_warn(difference, data)


def check_reward_template(name: str, trained: dict[str, Any], data: PromptTemplateConfig) -> None:
    """Compare this run's prompt template, in which a reward model sees the policy's tokens, with the one it was trained with.

    If they differ and ``data.on_template_mismatch`` is ``warn``, the difference is logged.

    Args:
        name: name of the reward model in the message.
        trained: the note next to its checkpoint, from :func:`read_template`.

    Raises:
        UserError: they differ and ``data.on_template_mismatch`` is ``refuse``.
    """
    if trained and trained["template_sha256"] != digest(data.prompt_template):
        difference = (
            f"data.prompt_template is {data.prompt_template!r} but {name} was trained with {trained['template']!r} and reads the "
            "policy's tokens: train one with the policy's template, or serve it with servers/serve_reward_model.py, which puts "
            "its own template around prompts (reward=server)"
        )
        _refuse_or_warn(difference, data)


def _refuse_or_warn(difference: str, data: PromptTemplateConfig) -> None:
    if data.on_template_mismatch == "refuse":
        raise UserError(f"{difference}, or set data.on_template_mismatch=warn")
    log.warning("%s", difference)


def _short(sha256: str | None) -> str:
    return "none" if sha256 is None else sha256[:12]

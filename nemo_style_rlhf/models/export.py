"""Exports a trained model as a plain Hugging Face directory."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from nemo_style_rlhf.checkpoint.files import published
from nemo_style_rlhf.models.loading import original_dropout
from nemo_style_rlhf.models.lora import CARRIED_FILES, merged


def export_model(
    model: PreTrainedModel, directory: Path, *, source: str, config_source: str | None = None,
    weights: Mapping[str, Tensor] | None = None, trust_remote_code: bool = False,
    write_notes: Callable[[Path], None] | None = None,
) -> None:  # fmt: skip
    """Write ``model`` with the tokenizer, chat template, dropout settings and notes of ``source``, the model before training.

    A model built from a bare config takes its dropout settings from ``config_source``; a model with sharded weights needs the
    whole ``weights``. Adapters are merged. ``write_notes`` adds files, which replace the notes of ``source``.
    A failure leaves ``directory`` unchanged.
    """
    original = original_dropout(config_source or source, trust_remote_code=trust_remote_code)
    trained_with = {key: getattr(model.config, key) for key in (*original, "use_cache")}
    _set(model, {**original, "use_cache": True})
    try:
        with published(directory) as beside:
            model.save_pretrained(beside, state_dict=dict(merged((weights or model.state_dict()).items(), model)))
            AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code).save_pretrained(beside)
            for name in CARRIED_FILES:
                if (Path(source) / name).is_file():
                    shutil.copy(Path(source) / name, beside / name)
            if write_notes is not None:
                write_notes(beside)
    finally:
        _set(model, trained_with)


def _set(model: PreTrainedModel, settings: dict[str, object]) -> None:
    for key, value in settings.items():
        setattr(model.config, key, value)

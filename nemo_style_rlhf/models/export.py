"""Exports a trained model as a plain Hugging Face directory."""

import shutil
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
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
    A failure leaves ``directory`` unchanged. ``model`` itself is only read, and if ``weights`` are given only its structure, so
    that it may train meanwhile.
    """
    original = original_dropout(config_source or source, trust_remote_code=trust_remote_code)
    shell = copy(model)  # the same layers, with a config of its own
    shell.config = deepcopy(model.config)
    for key, value in {**original, "use_cache": True}.items():
        setattr(shell.config, key, value)
    with published(directory) as beside:
        shell.save_pretrained(beside, state_dict=dict(merged((weights or model.state_dict()).items(), model)))
        AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code).save_pretrained(beside)
        for name in CARRIED_FILES:
            if (Path(source) / name).is_file():
                shutil.copy(Path(source) / name, beside / name)
        if write_notes is not None:
            write_notes(beside)

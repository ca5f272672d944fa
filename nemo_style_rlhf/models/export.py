"""Exports a trained model as a plain Hugging Face directory."""

from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from nemo_style_rlhf.checkpoint.files import published
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.loading import first_line, original_dropout
from nemo_style_rlhf.models.lora import copy_notes, merged


def export_model(
    model: PreTrainedModel, directory: Path, *, source: str, config_source: str | None = None,
    weights: Mapping[str, Tensor] | None = None, trust_remote_code: bool = False,
    write_notes: Callable[[Path], None] | None = None,
) -> None:  # fmt: skip
    """Write ``model`` with the tokenizer, chat template, dropout settings and notes of ``source``, the model before training.

    A model built from a bare config takes its dropout settings from ``config_source``; a model with sharded weights needs the
    whole ``weights``. Adapters are merged. ``write_notes`` adds files, replacing notes of ``source``.
    The generation config of ``source`` is copied as it is, even if transformers would refuse to save it.
    A failure leaves ``directory`` unchanged. ``model`` is only read. With ``weights`` only its structure is read, so it may train
    meanwhile.
    """
    original = original_dropout(config_source or source, trust_remote_code=trust_remote_code)
    shell = copy(model)  # the same layers, with a config of its own
    shell.config = deepcopy(model.config)
    for key, value in {**original, "use_cache": True}.items():
        setattr(shell.config, key, value)
    shell.generation_config = GenerationConfig.from_model_config(shell.config)  # the source's own is copied
    weights = model.state_dict() if weights is None else weights
    with published(directory) as beside:
        shell.save_pretrained(beside, state_dict=dict(merged(weights.items(), model)))
        AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code).save_pretrained(beside)
        copy_notes(source, beside)
        if write_notes is not None:
            write_notes(beside)


def rehearse_export(model: PreTrainedModel, *, source: str, **settings: Any) -> None:
    """Try :func:`export_model` before training: write everything but the weights into a temporary folder, and compare the shapes
    of the weights with the shapes that the written config.json asks for.

    Raises:
        UserError: the trained model could not be exported.
    """
    try:
        with TemporaryDirectory(prefix="nsr-export-") as folder:
            export_model(model, Path(folder) / "model", source=source, weights={}, **settings)
            config = type(model.config).from_pretrained(Path(folder) / "model")
        with torch.device("meta"):
            expected = {name: tensor.shape for name, tensor in type(model)(config).state_dict().items()}
    except Exception as error:
        raise UserError(
            f"{source} cannot be trained: what it is trained to could not be exported ({type(error).__name__}: "
            f"{first_line(error)}); correct the file that this names"
        ) from error
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, shape in expected.items():
        if shapes.get(name, shape) != shape:
            raise UserError(
                f"{source} cannot be trained: its {name} has shape {tuple(shapes[name])} where its config.json asks for "
                f"{tuple(shape)}: correct config.json"
            )

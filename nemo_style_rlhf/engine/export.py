"""Exports a model that an engine trains as a Hugging Face directory."""

from collections.abc import Callable
from pathlib import Path

from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.models.export import export_model
from nemo_style_rlhf.schema.common import ModelConfig


def export_engine(
    engine: Engine, ranks: Ranks, directory: Path, model: ModelConfig, *, write_notes: Callable[[Path], None] | None = None
) -> None:  # fmt: skip
    """Call :func:`export_model` for ``engine.module.hf``. Every rank calls this; the first writes."""
    weights = {}
    for name, tensor in engine.hf_weights():
        if ranks.is_first:
            weights[name] = tensor.cpu()
    if ranks.is_first:
        export_model(
            engine.module.hf, directory, source=model.path, weights=weights, write_notes=write_notes,
            trust_remote_code=model.trust_remote_code,
        )  # fmt: skip

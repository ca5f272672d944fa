"""Exports a model that an engine trains as a Hugging Face directory."""

from pathlib import Path

from torch import Tensor

from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.models.export import export_model
from nemo_style_rlhf.schema.common import ModelConfig


def host_weights(engine: Engine) -> dict[str, Tensor]:
    """Copies in host memory of :meth:`Engine.hf_weights`. Every rank calls this; only the first gets the weights.

    Tied weights stay one tensor: transformers recognizes them by that.
    """
    parameters = {name: id(each) for name, each in engine.module.hf.named_parameters(remove_duplicate=False)}
    copies: dict[int | str, Tensor] = {}
    weights = {}
    for name, tensor in engine.hf_weights(to_first=True):
        key = parameters.get(name, name)
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        weights[name] = copies[key]
    return weights


def export_engine(engine: Engine, ranks: Ranks, directory: Path, model: ModelConfig) -> None:
    """Call :func:`export_model` for ``engine.module.hf``. Every rank calls this; the first writes."""
    weights = host_weights(engine)
    if ranks.is_first:
        export_model(
            engine.module.hf, directory, source=model.path, weights=weights, trust_remote_code=model.trust_remote_code
        )

"""Weights under the names and in the shapes of published checkpoints, for other programs to load.

transformers fuses the experts of a mixture into three-dimensional tensors when it loads a checkpoint.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from nemo_style_rlhf.errors import UserError


def as_published(weights: Iterable[tuple[str, Tensor]], hf: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The ``weights`` of ``hf`` as its checkpoint has them. One tensor is converted at a time, mostly into views of it."""
    for name, tensor in weights:
        yield from revert_weight_conversion(hf, {name: tensor}).items()
        del tensor  # the next one may be as large


def require_sendable(hf: PreTrainedModel, path: str) -> None:
    """Check that :func:`as_published` gives what a checkpoint would.

    Raises:
        UserError: the model's weights can only be converted together.
    """
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in hf.state_dict().items()}
    together = {name: tensor.shape for name, tensor in revert_weight_conversion(hf, dict(shapes)).items()}
    apart = {name: tensor.shape for name, tensor in as_published(shapes.items(), hf)}
    if together != apart:
        differing = sorted(set(together.items()) ^ set(apart.items()))[0][0]
        raise UserError(
            f"the weights of {path} ({type(hf).__name__}) cannot be sent to vLLM one by one, {differing} among them: use "
            "generation.backend=hf"
        )

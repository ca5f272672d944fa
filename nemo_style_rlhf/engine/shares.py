"""What a model needs so that ZeRO-3 may hold its weights in shares over the ranks."""

from typing import Any

import deepspeed  # type: ignore[import-untyped]
from torch import Tensor, nn

from nemo_style_rlhf.models.policy import PolicyModel


def use_heads_in_shares(module: nn.Module) -> None:
    """Have the heads of policies gathered for the policy's forward: it multiplies with their weights itself, which outside of
    the head's own forward are in shares."""
    for policy in (part for part in module.modules() if isinstance(part, PolicyModel)):
        deepspeed.zero.register_external_parameter(policy, policy.hf.get_output_embeddings().weight)


def settle(engine: Any) -> None:
    """Back to shares alone: after a forward without a backward some parameters are still being gathered ahead for it."""
    engine.optimizer.parameter_offload.partition_all_parameters()


def whole(tensor: Tensor) -> Tensor:
    """A parameter that may be in shares, or a buffer, detached; every rank calls it."""
    if not hasattr(tensor, "ds_id"):
        return tensor.detach()
    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach()  # DeepSpeed lets go of what it has gathered (free_param), and we alone hold it


def make_whole(engine: Any, *, keep: bool) -> None:
    """Gather the parameters of a DeepSpeed engine for good, one after the other, into host memory; the engine has ended.

    Args:
        keep: on this rank; on others they stay empty.
    """
    settle(engine)
    engine.optimizer.parameter_offload._remove_module_hooks()
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_id"):
            parameter.all_gather(param_list=[parameter])
            whole = parameter.data
            parameter.data = whole.cpu() if keep else whole.new_empty(0)

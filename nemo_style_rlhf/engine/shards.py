"""Lets ZeRO-3 shard a model's weights over the ranks."""

from typing import Any

import deepspeed  # type: ignore[import-untyped]
from torch import Tensor, nn

from nemo_style_rlhf.engine import deepspeed_private
from nemo_style_rlhf.models.policy import PolicyModel


def use_sharded_heads(module: nn.Module) -> None:
    """Have the heads of policies gathered for the policy's forward, which multiplies with the head's weights itself: outside of
    the head's own forward they are sharded."""
    for policy in (part for part in module.modules() if isinstance(part, PolicyModel)):
        deepspeed.zero.register_external_parameter(policy, policy.hf.get_output_embeddings().weight)


def settle(engine: Any) -> None:
    """Release all gathered parameters: after a forward without a backward, some are still being prefetched."""
    engine.optimizer.parameter_offload.partition_all_parameters()


def whole(tensor: Tensor) -> Tensor:
    """A parameter, gathered if it is sharded, or a buffer; detached. Every rank calls this."""
    if not hasattr(tensor, "ds_id"):
        return tensor.detach()
    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach()  # DeepSpeed drops its reference (free_param), so only the caller holds the tensor


def make_whole(engine: Any, *, keep: bool) -> None:
    """Gather the parameters of a DeepSpeed engine permanently, one by one, into host memory; the engine is unusable afterwards.

    Args:
        keep: whether this rank keeps them; otherwise they stay empty.
    """
    settle(engine)
    deepspeed_private.gather_no_more(engine)
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_id"):
            parameter.all_gather(param_list=[parameter])
            whole = parameter.data
            parameter.data = whole.cpu() if keep else whole.new_empty(0)

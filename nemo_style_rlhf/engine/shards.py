"""Lets ZeRO-3 shard a model's weights over the ranks."""

from collections.abc import Iterable, Iterator
from typing import Any

import deepspeed  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_style_rlhf.engine import deepspeed_private
from nemo_style_rlhf.models.policy import PolicyModel

TOGETHER_BYTES = 2**22
"""Parameters are gathered together up to this many bytes; a larger one by itself."""


def place(module: nn.Module, config: dict[str, Any], device: torch.device) -> None:
    """Move ``module`` to ``device``; if DeepSpeed's ``config`` asks for ZeRO-3, only this rank's shard of each parameter.
    DeepSpeed itself would first move the whole module."""
    zero = config["zero_optimization"]
    if zero["stage"] < 3:
        module.to(device)
        return
    group = deepspeed_private.node_group(zero["zero_hpz_partition_size"])
    deepspeed.zero.Init(module=module, config_dict_or_path=config, zero_param_parallel_group=group)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


def use_sharded_heads(module: nn.Module) -> None:
    """Gather the heads of policies for the policy's forward. It multiplies with the head's weights itself, and these are sharded
    outside of the head's own forward."""
    for policy in (part for part in module.modules() if isinstance(part, PolicyModel)):
        deepspeed.zero.register_external_parameter(policy, policy.hf.get_output_embeddings().weight)


def settle(engine: Any) -> None:
    """Release all gathered parameters: after a forward without a backward, some are still being prefetched."""
    engine.optimizer.parameter_offload.partition_all_parameters()


def whole_weights(
    weights: Iterable[tuple[str, Tensor]], device: torch.device, *, to_first: bool
) -> Iterator[tuple[str, Tensor]]:
    """The named ``weights`` in order, parameters gathered if they are sharded; detached. Every rank iterates over all of them.

    Small parameters are gathered together. With ``to_first`` the other ranks only send their shards, and get nothing.
    """
    together: list[tuple[str, Any]] = []
    size = 0
    for name, tensor in weights:
        sharded: Any = tensor if hasattr(tensor, "ds_id") else None
        added = 0 if sharded is None else sharded.ds_numel * sharded.element_size()
        if together and (sharded is None or size + added > TOGETHER_BYTES):
            yield from _gathered(together, device, to_first=to_first)
            together, size = [], 0
        if sharded is not None:
            together.append((name, sharded))
            size += added
        elif not to_first or dist.get_rank() == 0:
            yield name, tensor.detach()
    if together:
        yield from _gathered(together, device, to_first=to_first)


def _gathered(
    parameters: list[tuple[str, Any]], device: torch.device, *, to_first: bool
) -> Iterator[tuple[str, Tensor]]:
    """Gather sharded parameters. A single one takes no memory but its own."""
    parts = [each.ds_tensor.detach().to(device).flatten().view(torch.uint8) for _, each in parameters]
    sizes, own = [len(part) for part in parts], parts[0] if len(parts) == 1 else torch.cat(parts)
    receives = not to_first or dist.get_rank() == 0
    shards = own.new_empty((dist.get_world_size() if receives else 0, len(own)))
    if to_first:
        dist.gather(own, list(shards) if receives else None, dst=0)
    else:
        dist.all_gather_into_tensor(shards.view(-1), own)
    del parts, own
    for (name, each), columns in zip(parameters, shards.split(sizes, 1), strict=True):
        if receives:
            yield name, columns.reshape(-1).view(each.dtype)[: each.ds_numel].view(each.ds_shape)


def make_whole(engine: Any, *, keep: bool) -> None:
    """Gather the parameters of a DeepSpeed engine permanently, one by one, into host memory; the engine is unusable afterwards.

    Args:
        keep: True if this rank keeps them; otherwise they stay empty.
    """
    settle(engine)
    deepspeed_private.gather_no_more(engine)
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_id"):
            parameter.all_gather(param_list=[parameter])
            whole = parameter.data
            parameter.data = whole.cpu() if keep else whole.new_empty(0)

"""Finds the settings that would save most memory, by planning with each of them."""

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import validate
from nemo_style_rlhf.schema.generation import CPU_KV_CACHE_GIB
from nemo_style_rlhf.schema.plan import PlanConfig

ADAPTER_RANK = 16
WORTH_NAMING = 2**20
"""Smallest saving to name, in bytes."""


@dataclass(frozen=True)
class Change:
    text: str
    """The setting as written on the command line."""
    saved: int
    """Saved bytes on one device."""


class Plans(Protocol):
    def demand(self, config: PlanConfig, names: Collection[str]) -> int: ...


def best_changes(config: PlanConfig, planner: Plans, names: Collection[str], *, count: int = 3) -> list[Change]:
    """The ``count`` single settings that save most memory of the processes ``names``; fewer if fewer help."""
    before = planner.demand(config, names)
    changes = []
    for key, value in candidates(config):
        changed = copy.deepcopy(config)
        _set(changed, key, value)
        try:
            validate(changed)
            saved = before - planner.demand(changed, names)
        except UserError:  # this setting conflicts with the others
            continue
        if saved >= WORTH_NAMING:
            changes.append(Change(f"{key}={str(value).lower() if isinstance(value, bool) else value}", saved))
    return sorted(changes, key=lambda change: -change.saved)[:count]


def candidates(config: PlanConfig) -> Iterator[tuple[str, Any]]:
    """Settings to try, as key and value, without those already set."""
    for prefix, side, ranks in (("", config, config.ranks), ("critic.", config.critic, config.critic_ranks)):
        if not side.model.lora.rank:
            yield f"{prefix}model.lora.rank", ADAPTER_RANK
        if side.model.dtype == "float32":
            yield f"{prefix}model.dtype", "bfloat16"
        if not side.model.gradient_checkpointing:
            yield f"{prefix}model.gradient_checkpointing", True
        if not side.model.packing:
            yield f"{prefix}model.packing", True
        if side.model.attn_implementation != "sdpa":
            yield f"{prefix}model.attn_implementation", "sdpa"
        yield f"{prefix}engine.micro_batch_tokens", max(1, side.engine.micro_batch_tokens // 2)
        if side.engine.zero_stage < 3 and ranks > 1:
            yield f"{prefix}engine.zero_stage", side.engine.zero_stage + 1
        if side.engine.zero_stage and ranks == 1:
            yield f"{prefix}engine.zero_stage", 0
        for offload in ("offload_optimizer", "offload_parameters"):
            if not getattr(side.engine, offload):
                yield f"{prefix}engine.{offload}", True
        yield f"{prefix.replace('.', '_')}ranks", 2 * ranks
    if config.model.reference == "copy":
        yield "model.reference", "cpu_offload"
    yield "generation.kv_cache_gib", (config.generation.kv_cache_gib or CPU_KV_CACHE_GIB) / 2
    yield "generation.gpu_memory_utilization", config.generation.gpu_memory_utilization / 2
    if not config.placement.in_turns and not config.algorithm.staleness:
        yield "placement.share", "turns"
    if not config.critic.reward_model.offload_reward_model:
        yield "critic.reward_model.offload_reward_model", True
    if not config.critic.engine.offload_optimizer_states:
        yield "critic.engine.offload_optimizer_states", True


def _set(config: Any, key: str, value: Any) -> None:
    *groups, name = key.split(".")
    for group in groups:
        config = getattr(config, group)
    setattr(config, name, value)

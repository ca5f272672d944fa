"""The private parts of DeepSpeed that this package touches, as they are in DeepSpeed 0.19.8."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from torch import Size, Tensor
from torch.optim import Optimizer


def compile_nothing() -> None:
    """Never compile an op of DeepSpeed: its collectives in shared memory take 40 s that do not pay off for a few ranks, and other
    ops are not used. Otherwise DeepSpeed would try which ops it can compile, with a message for each failure."""
    from deepspeed import ops  # type: ignore[import-untyped]

    ops.__compatible_ops__ = {}


def compile_no_muon() -> None:
    """Import DeepSpeed's Muon without ``torch.compile``: that loads Inductor for 3 s, and AdamW's trainers do not use Muon."""
    from deepspeed.runtime import compiler  # type: ignore[import-untyped]

    compile_it, compiler.compile = compiler.compile, lambda: lambda function: function
    try:
        import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compile_it


def use_checkpoint_engine(engine: Any, kind: type) -> None:
    """Make ``engine`` write and read the files of its checkpoints through ``kind``, a TorchCheckpointEngine."""
    engine.checkpoint_engine = kind(engine._config)


def copy_no_script(engine: Any) -> None:
    """Write no conversion script next to checkpoints: DeepSpeed writes it to disk without the checkpoint engine."""
    engine._copy_recovery_script = lambda _: None


def relink_optimizer_states(optimizer: Any) -> None:
    """Call this after a load: an optimizer that has already stepped keeps links from parameters to its old states."""
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False


def parameter_shapes(engine: Any) -> list[dict[str, Size]]:
    """The shapes of the trained parameters by name, for each of the optimizer's groups."""
    shapes: list[dict[str, Size]] = engine._get_zero_param_shapes()
    return shapes


def fragment(parameter: Any) -> Any:
    """The place of ``parameter``'s fragment in this rank's optimizer (ZeRO 1 and 2); None if it has none."""
    return parameter._hp_mapping


def node_group(ranks: int) -> Any:
    """The group of ``ranks`` neighboring ranks with which this one shards ZeRO-3's second copy of weights; None for 1.

    DeepSpeed makes it only once per process, and refuses to for a second model.
    """
    from deepspeed.utils import groups  # type: ignore[import-untyped]

    if ranks > 1 and groups._get_zero_param_intra_parallel_group() is None:
        groups._create_zero_param_parallel_group(ranks)
    return groups._get_zero_param_intra_parallel_group() if ranks > 1 else None


def gather_no_more(engine: Any) -> None:
    """Remove the hooks with which ZeRO-3 gathers the weights of a module for its forward."""
    engine.optimizer.parameter_offload._remove_module_hooks()


def tensors_of(holder: Any, seen: dict[int, Any] | None = None) -> Iterator[Tensor]:
    """All tensors that an optimizer holds: flat weights and masters, states, buffers of gradients, in whatever attributes."""
    seen = {} if seen is None else seen
    if id(holder) in seen:
        return
    seen[id(holder)] = holder
    if isinstance(holder, Tensor):
        yield holder
    elif isinstance(holder, dict):
        for part in holder.values():
            yield from tensors_of(part, seen)
    elif isinstance(holder, list | tuple | set):
        for part in holder:
            yield from tensors_of(part, seen)
    elif isinstance(holder, Optimizer) or type(holder).__module__.startswith("deepspeed.runtime.zero."):
        yield from tensors_of(vars(holder), seen)

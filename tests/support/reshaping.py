"""Started by test_reshape.py under torchrun, and used by it: writes checkpoints of an engine, and loads them."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.process_group import init_distributed
from nemo_style_rlhf.schema.common import EngineConfig, OptimizerConfig, SchedulerConfig

X = torch.linspace(-1, 1, 56).view(8, 7)
FURTHER = 3
"""Number of steps after the checkpoint."""


@dataclass(frozen=True)
class Case:
    """ZeRO stage and number of ranks, before and after."""

    before: tuple[int, int]
    after: tuple[int, int]
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    steps: int = 3
    """Number of steps before the checkpoint."""
    used: int = 0
    """Number of steps that the loading engine has already taken."""
    offload: str = ""
    """When everything that the stage can offload is offloaded: ``always``, or only ``after`` the checkpoint."""
    hpz: int = 1
    """Ranks among which ZeRO-3 divides its second copy of the weights, after the checkpoint."""
    regrouped: bool = False
    """Whether ZeRO-3's flat tensors are larger after the checkpoint."""

    def __str__(self) -> str:
        shapes = "-".join(f"zero{stage}x{ranks}" for stage, ranks in (self.before, self.after))
        extra = [str(self.dtype).removeprefix("torch."), *(["frozen"] if self.frozen else []), f"step{self.steps}"]
        return "-".join(
            [
                shapes,
                *extra,
                *([f"offload_{self.offload}"] if self.offload else []),
                *([f"hpz{self.hpz}"] if self.hpz > 1 else []),
                *(["regrouped"] if self.regrouped else []),
            ]
        )


CASES = [
    Case((0, 1), (1, 2)),
    Case((1, 2), (0, 1)),
    Case((2, 2), (3, 1), used=2),
    Case((3, 2), (2, 1)),
    Case((3, 1), (3, 2)),
    Case((1, 2), (2, 2), used=2),
    Case((0, 1), (0, 2), used=2),
    Case((1, 2), (3, 1), dtype=torch.bfloat16),
    Case((3, 1), (2, 2), dtype=torch.bfloat16, used=1),
    Case((0, 1), (0, 1), dtype=torch.bfloat16, used=2),
    Case((0, 1), (1, 2), dtype=torch.bfloat16),
    Case((0, 2), (3, 1), dtype=torch.bfloat16, used=1),
    Case((2, 2), (0, 2), dtype=torch.bfloat16, used=2),
    Case((3, 2), (0, 1), dtype=torch.bfloat16, steps=0, used=1),
    Case((0, 1), (2, 2), frozen=True),
    Case((0, 1), (2, 2), dtype=torch.bfloat16, frozen=True),
    Case((1, 2), (0, 1), frozen=True, used=1),
    Case((0, 1), (3, 2), steps=0),
    Case((1, 2), (0, 1), steps=0, used=1),
    Case((2, 2), (3, 2), offload="always"),
    Case((3, 2), (3, 1), offload="always", used=2),
    Case((3, 2), (1, 2), offload="always", dtype=torch.bfloat16, used=1),
    Case((2, 2), (2, 2), offload="after", used=2),
    Case((3, 2), (3, 2), offload="after"),
    Case((3, 2), (3, 2), regrouped=True, used=1),
    Case((3, 2), (3, 2), hpz=2, used=2),
    Case((2, 2), (3, 2), hpz=2, used=1),
]


class Model(nn.Module):
    """Only one parameter has an even number of elements; ``forwards`` is a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 1)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def make_engine(stage: int, case: Case, *, offload: bool = False, sub_group: int = 30, hpz: int = 1) -> Engine:
    torch.manual_seed(0)
    model = Model().to(case.dtype)
    model.first.requires_grad_(not case.frozen)
    optim = OptimizerConfig(lr=0.02, weight_decay=0.1)
    scheduler = SchedulerConfig(name="cosine", warmup_steps=2, total_steps=10)
    config = EngineConfig(zero_stage=stage, optim=optim, scheduler=scheduler, gradient_clip_val=0.5)
    config.offload_optimizer = offload and stage > 0
    config.offload_parameters = offload and stage == 3
    config.zero_hpz_partition_size = hpz
    if stage == 3:  # several flat tensors, as in a model of billions
        config.deepspeed = {"zero_optimization": {"sub_group_size": sub_group, "reduce_bucket_size": 100}}
    if stage == 2:  # and several buckets
        config.deepspeed = {"zero_optimization": {"reduce_bucket_size": 40}}
    return Engine(model, config, device=torch.device("cpu"))


def take_steps(engine: Engine, count: int) -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dtype = next(engine.module.buffers()).dtype
    for _ in range(count):
        for rows in X.to(dtype).chunk(2):
            engine.backward(engine(rows[rank::ranks]).float().square().sum() / len(X))
        engine.step()


def whole(engine: Engine) -> dict[str, Any]:
    """Everything that training depends on, gathered; every rank calls this."""
    inner = engine._deepspeed
    states = inner.basic_optimizer.state
    found: dict[str, Any] = {
        "step": sorted({float(state["step"]) for state in states.values() if state}),
        "schedule": inner.lr_scheduler.state_dict(),
        "lr": [group["lr"] for group in inner.optimizer.param_groups],
        "counters": (inner.global_steps, inner.skipped_steps),
    }
    found |= {f"low precision {name}": tensor.clone() for name, tensor in engine.named_weights()}
    if found["step"] and hasattr(inner.optimizer, "_lazy_init_hp_params_optimizer_state"):
        inner.optimizer._lazy_init_hp_params_optimizer_state()
    plain = engine.config.zero_stage == 0
    masters = list(inner.basic_optimizer.param_groups[0]["params"])
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        master = masters.pop(0) if plain else parameter
        found[f"fp32 {name}"] = (master.detach() if plain else safe_get_full_fp32_param(parameter)).clone()
        for moment in ("exp_avg", "exp_avg_sq") if found["step"] else ():
            tensor = states[master][moment] if plain else safe_get_full_optimizer_state(parameter, moment)
            found[f"{moment} {name}"] = tensor.clone()
    return found


def write(case: Case, folder: Path) -> None:
    """Write a checkpoint, and the state of the engine at that moment and ``FURTHER`` steps later."""
    engine = make_engine(case.before[0], case, offload=case.offload == "always")
    take_steps(engine, case.steps)
    engine.snapshot().write(folder / str(case))
    torch.distributed.barrier()
    _note(engine, folder / f"{case}.before.pt", then=FURTHER)


def resume(case: Case, folder: Path) -> None:
    sub_group = 50 if case.regrouped else 30
    engine = make_engine(case.after[0], case, offload=bool(case.offload), sub_group=sub_group, hpz=case.hpz)
    take_steps(engine, case.used)
    engine.load(folder / str(case))
    _note(engine, folder / f"{case}.after.pt", then=FURTHER)


def _note(engine: Engine, path: Path, then: int) -> None:
    at_checkpoint = whole(engine)
    take_steps(engine, then)
    further = whole(engine)
    if torch.distributed.get_rank() == 0:
        torch.save((at_checkpoint, further), path)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    init_distributed(torch.device("cpu"))
    ranks = torch.distributed.get_world_size()
    for case in CASES:
        if case.before[1] == ranks:
            write(case, folder)
            torch.distributed.barrier()
        if case.after[1] == ranks:
            resume(case, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Where a run stands once it has resumed. That training then ends with the same bits takes real runs: tests/integration."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_style_rlhf.checkpoint.store import AHEAD, CheckpointStore
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.errors import StorageError
from nemo_style_rlhf.launch import interrupt
from nemo_style_rlhf.ppo import validation
from nemo_style_rlhf.ppo.parts import Parts
from nemo_style_rlhf.ppo.recovery import Recovery
from nemo_style_rlhf.ppo.residency import Residency
from nemo_style_rlhf.ppo.session import Progress, RunSession
from nemo_style_rlhf.ppo.trainer import PPOTrainer
from nemo_style_rlhf.rollout.experience import ShapingState
from nemo_style_rlhf.rollout.producer import Timers
from nemo_style_rlhf.schema.actor import PPOActorConfig

UNTOUCHED = ShapingState(0.125)
STOOD = Progress(
    step=3, data_position=24, critic_step=2, best_reward=1.5, collector=asdict(ShapingState(0.25, {"count": 9, "mean": 0.5})),
)  # fmt: skip


class Run:
    """A trainer without models: it notes what its parts are told."""

    def __init__(self, folder: Path) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.store = CheckpointStore(folder / "checkpoints", keep_last=2)
        config = PPOActorConfig()
        config.run.output_dir = str(folder)
        engine: Any = SimpleNamespace(
            device=torch.device("cpu"), hf_weights=lambda *, to_first: iter(()), module=SimpleNamespace(hf=None)
        )
        queue: Any = SimpleNamespace(
            stores_weights=False,
            abandon=lambda: self.told.append(("abandon",)),
            restore=lambda *where: self.told.append(("restore", *where)),
            publish=lambda update, *_, **__: self.told.append(("publish", update.version)),
            prefetched=lambda step: None,
            owes_validation=lambda version: False,
        )
        saver: Any = SimpleNamespace(
            abandon=lambda *, at: None,
            load=lambda _, step: self.told.append(("load", step)),
            save=lambda _, step, state, **__: self.told.append(("save", step, state)),
            settle=lambda: self.told.append(("settle",)),
        )
        ranks = Ranks()
        recovery = Recovery(None, self.store, ranks, run_id="run", output_dir=folder)
        residency = Residency(engine, queue, None, ranks, in_turns=False)
        self.experience: Any = SimpleNamespace(state=UNTOUCHED)
        nothing: Any = None
        parts = Parts(
            engine=engine, residency=residency, queue=queue, experience=self.experience, critic=None, sampler=nothing,
            tokenizer=nothing, probe=SimpleNamespace(target=lambda _: None), metrics=None, rollouts=None, ranks=ranks,
        )  # fmt: skip
        self.session = RunSession(config, parts, self.store, saver, recovery, total_steps=5)
        self.trainer = PPOTrainer(config, parts, self.session)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(interrupt, "describe", lambda _: None)  # of this process
    return Run(tmp_path)


def test_a_run_goes_on_where_its_checkpoint_stood(run: Run) -> None:
    run.store.begin(3)
    run.store.commit(3, "run", critic={}, state=asdict(STOOD), versions={})
    run.trainer._restore()
    assert run.told == [
        ("abandon",), ("load", 3), ("restore", 3, 24, run.store.part(3, AHEAD)), ("publish", 3),
    ]  # fmt: skip
    assert run.session.progress == STOOD and run.session.restored and run.session.goes_on
    assert run.experience.state == ShapingState(**STOOD.collector)


def test_a_run_that_loses_its_server_before_the_first_checkpoint_begins_anew(run: Run) -> None:
    """What the lost steps made of the shaping of rewards goes with them, and a checkpoint of step 0 comes first."""
    run.experience.state = ShapingState(0.5)
    run.trainer._restore()
    assert run.experience.state == UNTOUCHED
    assert run.told == [
        ("abandon",), ("restore", 0, 0, run.store.part(0, AHEAD)), ("publish", 0), ("save", 0, asdict(Progress())),
        ("settle",),
    ]  # fmt: skip


def test_a_best_policy_that_the_disk_refuses_ends_no_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a checkpoint would not. The best so far stays the one that was written."""
    rewards, written = iter([1.0, 3.0, 2.0, 4.0]), iter([True, False, True, True])
    exported: list[dict[str, float]] = []

    def export(parts: Parts, config: PPOActorConfig, name: str, notes: dict[str, str]) -> None:
        if not next(written):
            raise StorageError("the policy's export best cannot be written (disk full: 2 GiB missing in /runs)")
        exported.append(json.loads(notes["best.json"]))

    monkeypatch.setattr(validation, "export_policy", export)
    run.trainer._config.checkpoint.keep_best = True
    run.trainer._parts.queue.owes_validation = lambda version: True  # type: ignore[method-assign]
    run.trainer._parts.queue.validation = lambda step: {"val_rollouts/rewards": next(rewards)}  # type: ignore[method-assign]
    for step in (1, 2, 3, 4):
        assert "val_rollouts/rewards" in run.trainer._validation.end_step(step, Timers())
    assert [(note["step"], note["val_rollouts/rewards"]) for note in exported] == [(1, 1.0), (3, 2.0), (4, 4.0)]
    assert run.session.progress.best_reward == 4.0
    assert "disk full: 2 GiB missing in /runs); training goes on, and the best so far stays" in caplog.text

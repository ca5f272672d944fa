"""Rows of validations: which step writes which, and which the last step waits for."""

from types import SimpleNamespace
from typing import Any

import pytest

from nemo_style_rlhf.ppo.validation import Validation
from nemo_style_rlhf.rollout.producer import Timers
from nemo_style_rlhf.rollout.version_schedule import Schedule


class Run:
    """A run of four steps that validates each version."""

    def __init__(self, staleness: int, *, keep_best: bool = False) -> None:
        self.rows: list[tuple[int, int]] = []
        """The step during which a row was written or returned, and its version."""
        self.step, self.owed = 0, {0}
        queue = SimpleNamespace(
            schedule=Schedule(staleness, 4), owes_validation=lambda version: version in self.owed,
            validation=lambda version: self.owed.remove(version) or {"val_rollouts/rewards": float("nan")},
        )  # fmt: skip
        config: Any = SimpleNamespace(
            algorithm=SimpleNamespace(staleness=staleness, val_check_interval=1), checkpoint=SimpleNamespace(keep_best=keep_best)
        )  # fmt: skip
        parts: Any = SimpleNamespace(queue=queue, residency=SimpleNamespace(enter=lambda phase: None))
        session: Any = SimpleNamespace(total_steps=4, progress=SimpleNamespace(step=0, best_reward=None))
        reporter: Any = SimpleNamespace(row=lambda version, metrics: self.rows.append((self.step, version)))
        self.validation = Validation(config, parts, session, reporter)
        self.validation.begin_run()
        self._progress = session.progress

    def train(self) -> None:
        self.step += 1
        self.validation.begin_step(self.step)
        self.owed.add(self.step)
        if self.validation.end_step(self.step, Timers()):
            self.rows.append((self.step, self.step))
        self._progress.step = self.step


@pytest.mark.parametrize(
    ("staleness", "keep_best", "rows"),
    [
        (0, False, [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]),
        (1, False, [(2, 0), (3, 1), (4, 2), (4, 3), (4, 4)]),
        (2, False, [(3, 0), (4, 1), (4, 2), (4, 3), (4, 4)]),
        (2, True, [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]),
    ],
)
def test_a_row_is_written_when_its_samples_are_there_without_a_wait(staleness, keep_best, rows):
    run = Run(staleness, keep_best=keep_best)
    for _ in range(4):
        run.train()
    assert run.rows == rows and not run.owed


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_run_that_ends_early_writes_what_is_missing(staleness):
    run = Run(staleness)
    run.train()
    run.train()
    run.validation.end_run()
    assert sorted(version for _, version in run.rows) == [0, 1, 2] and not run.owed

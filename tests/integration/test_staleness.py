"""Asynchronous training learns the bits of the same schedule done one thing after another, whatever is killed and delayed."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.integration.test_engine_runs import kill_engine, result, wait_for_rollouts
from tests.support import ppo_runs
from tests.support.metrics import metrics
from tests.support.processes import proxy, run_pair, start_actor, start_server

LONGEST_DELAY_S = 0.3
RANKS = {1: 1, 2: 2}
"""Ranks of the actor, by staleness."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ppo_runs.save_inputs(tmp_path_factory.mktemp("staleness") / "inputs")


def overrides(inputs: Path, staleness: int, engines: int) -> list[str]:
    """Values of a critic, dropout, warmup, a filter that drops prompts, and validations that nobody waits for."""
    return [
        *ppo_runs.actor_overrides(inputs), f"algorithm.staleness={staleness}", f"generation.engines.count={engines}",
        "algorithm.correction.kind=tis", "algorithm.filter.low=-0.3", "algorithm.filter.oversample=1.4",
        "model.disable_dropout=false", "checkpoint.keep_best=false", "algorithm.val_check_interval=2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def one_after_another(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[object, ...]]:
    """What runs without engines learn, by staleness."""
    learned = {}
    for staleness, ranks in RANKS.items():
        folder = tmp_path_factory.mktemp(f"staleness_{staleness}")
        run_pair(folder, ppo_runs.server_overrides(inputs), overrides(inputs, staleness, 0), ranks=ranks)
        learned[staleness] = result(folder)
    return learned


@pytest.mark.more
def test_everything_at_once_and_late(inputs, one_after_another, tmp_path) -> None:
    critic, port = start_server(tmp_path / "critic", *ppo_runs.server_overrides(inputs))
    with proxy(lambda: port, lambda *_: time.sleep(random.uniform(0, LONGEST_DELAY_S))) as late_port:
        actor = start_actor(tmp_path / "actor", late_port, *overrides(inputs, 2, 2), ranks=RANKS[2])
        try:
            with engines_that_pause(actor.pid):
                assert actor.wait(240) == 0, actor.output()
        finally:
            actor.kill()
            assert critic.terminate() == 0
    assert result(tmp_path) == one_after_another[2]
    rows = metrics(tmp_path / "actor")
    assert [row["step"] for row in rows if "val_rollouts/rewards" in row] == [0, 2, 4, 6]
    assert [row["step"] for row in rows] == [1, 2, 0, 3, 4, 2, 5, 4, 6]  # validations are written late
    assert max(row.get("train_rollouts/filtered_prompts", 0) for row in rows) > 0
    behind = [row["async/staleness_max"] for row in rows if "async/staleness_max" in row]
    assert (
        behind == [0, 1, 2, 2, 2, 2] == [row["async/staleness_mean"] for row in rows if "async/staleness_mean" in row]
    )


def test_everything_killed(inputs, one_after_another, tmp_path) -> None:
    """Actor, critic server and engines, one of which only hangs, while batches are ahead of the last checkpoint."""
    settings, folder = [*overrides(inputs, 1, 2), "generation.engines.hung_after_s=8"], tmp_path / "actor"
    critic, port = start_server(tmp_path / "critic", *ppo_runs.server_overrides(inputs))
    actor = start_actor(folder, port, *settings)
    try:
        wait_for_rollouts(actor, folder, 1)
        kill_engine(actor, folder, 0)
        wait_for_rollouts(actor, folder, 3)
        actor.kill()
        assert list((folder / "checkpoints").glob("step_*/ahead/*"))
        actor = start_actor(folder, port, *settings)
        wait_for_rollouts(actor, folder, 4)
        critic.kill()
        critic, _ = start_server(tmp_path / "critic", *ppo_runs.server_overrides(inputs), f"server.port={port}")
        kill_engine(actor, folder, 1, signal.SIGSTOP)
        assert actor.wait(240) == 0, actor.output()
    finally:
        actor.kill()
        assert critic.terminate() == 0
    assert "is lost: it does not answer for" in actor.output()
    assert "resumed from step" in actor.output() and "go back to their last common checkpoint" in actor.output()
    assert result(tmp_path) == one_after_another[1]


@contextmanager
def engines_that_pause(trainer: int) -> Iterator[None]:
    """Stop an engine of the trainer for a moment, again and again."""
    ended = threading.Event()

    def pause() -> None:
        while not ended.wait(random.uniform(0, LONGEST_DELAY_S)):
            engines = [
                each
                for each in psutil.Process(trainer).children(recursive=True)
                if "serve_engine" in " ".join(each.cmdline())
            ]
            for engine in random.sample(engines, min(len(engines), 1)):
                os.kill(engine.pid, signal.SIGSTOP)
                time.sleep(random.uniform(0, LONGEST_DELAY_S))
                os.kill(engine.pid, signal.SIGCONT)

    thread = threading.Thread(target=pause, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

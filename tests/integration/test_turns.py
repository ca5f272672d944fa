"""A PPO run whose parts take turns on one device ends with the bits of one whose parts all stay there."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration import test_agents
from tests.integration.test_engine_runs import FILTERED, kill_engine, result, wait_for_rollouts
from tests.support import ppo_runs
from tests.support.metrics import metrics
from tests.support.processes import Process, run_pair, start_actor, start_server, wait_for_output

TURNS, ENGINES = "placement.share=turns", "generation.engines.count=2"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ppo_runs.save_inputs(tmp_path_factory.mktemp("turns") / "inputs")


def overrides(inputs: Path, *more: str) -> list[str]:
    return [*ppo_runs.actor_overrides(inputs), *FILTERED, *more]


@pytest.fixture(scope="module")
def together(undisturbed: Callable[..., Path]) -> tuple[object, ...]:
    return result(undisturbed("filtered", *FILTERED))


def test_it_learns_the_same_in_turns(inputs, together, tmp_path) -> None:
    run_pair(tmp_path, ppo_runs.server_overrides(inputs), overrides(inputs, TURNS))
    assert result(tmp_path) == together
    rows = [row for row in metrics(tmp_path / "actor") if "placement/handover_seconds" in row]
    assert len(rows) == ppo_runs.STEPS and all(row["placement/peak_gib"] > 0 for row in rows)
    step, validation = ["generate", "score", "train"], ["generate", "score"]
    begin, best, end = ["train"], ["train"], ["train"]
    assert order((tmp_path / "actor" / "actor.log").read_text()) == [
        *begin, *validation, *best, *step, *step, *step, *validation, *step, *step, *step, *validation, *end,
    ]  # fmt: skip


def order(log: str) -> list[str]:
    """The phases in the order in which they had their turns."""
    return re.findall(r"turn of (\w+) after", log)


@pytest.mark.more
def test_engines_take_turns_with_two_ranks_and_one_is_killed_while_it_sleeps(inputs, tmp_path) -> None:
    """Only the first rank makes batches, and goes through the rounds of the filter while the other one waits."""
    ranks = {"ranks": 2}
    (tmp_path / "together").mkdir()
    run_pair(tmp_path / "together", ppo_runs.server_overrides(inputs), overrides(inputs, ENGINES), **ranks)
    folder = tmp_path / "actor"
    critic, port = start_server(tmp_path / "critic", *ppo_runs.server_overrides(inputs))
    actor = start_actor(folder, port, *overrides(inputs, ENGINES, TURNS), **ranks)
    try:
        wait_for_rollouts(actor, folder, 2)
        wait_for_turn(actor, "train")
        kill_engine(actor, folder, 1)
        assert actor.wait(300) == 0, actor.output()
    finally:
        actor.kill()
        assert critic.terminate() == 0
    assert "engine engine-1 is lost" in actor.output()
    assert result(tmp_path) == result(tmp_path / "together")


@pytest.mark.more
@pytest.mark.parametrize("engines", [0, 2])
def test_everybody_is_killed_in_every_phase(inputs, together, tmp_path, engines: int) -> None:
    """The trainer in each of its phases, the critic while it sleeps and while it has its turn."""
    settings, folder = overrides(inputs, TURNS, f"generation.engines.count={engines}"), tmp_path / "actor"
    server = ppo_runs.server_overrides(inputs)
    critic, port = start_server(tmp_path / "critic", *server)
    actor = start_actor(folder, port, *settings)
    try:
        for step, phase in enumerate(("generate", "score", "train"), start=1):
            wait_for_rollouts(actor, folder, step)
            wait_for_turn(actor, phase)
            actor.kill()
            actor = start_actor(folder, port, *settings)
        for step, phase in ((4, "train"), (5, "score")):
            wait_for_rollouts(actor, folder, step)
            wait_for_turn(actor, phase)
            critic.kill()
            critic, _ = start_server(tmp_path / "critic", *server, f"server.port={port}")
        assert actor.wait(300) == 0, actor.output()
    finally:
        actor.kill()
        assert critic.terminate() == 0
    assert "resumed from step" in actor.output() and "go back to their last common checkpoint" in actor.output()
    assert result(tmp_path) == together


@pytest.mark.more
def test_episodes_are_played_in_the_turn_of_generation(inputs, tmp_path) -> None:
    """Of agents a quarter of whose episodes has trouble; the critic gives rewards once all have ended, and values after that."""
    agents = [*test_agents.overrides(inputs, 1), "algorithm.staleness=0", "algorithm.correction.kind=none"]
    agents.append(f"algorithm.max_steps={(steps := 2)}")
    for name, more in (("together", []), ("turns", [TURNS])):
        (tmp_path / name).mkdir()
        run_pair(tmp_path / name, ppo_runs.server_overrides(inputs), [*agents, *more])
    assert result(tmp_path / "turns", steps) == result(tmp_path / "together", steps)


def wait_for_turn(actor: Process, phase: str) -> None:
    """Wait until the next turn of ``phase`` begins."""
    wait_for_output(actor, f"turn of {phase} after", after=len(actor.output()))

"""A PPO run whose parts take turns on one device ends with the bits of one whose parts all stay there."""

from pathlib import Path

import pytest

from tests.integration.test_engine_runs import FILTERED, result
from tests.support import ppo_runs
from tests.support.metrics import metrics
from tests.support.processes import run_pair

TURNS = "placement.share=turns"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ppo_runs.save_inputs(tmp_path_factory.mktemp("turns") / "inputs")


def overrides(inputs: Path, *more: str) -> list[str]:
    return [*ppo_runs.actor_overrides(inputs), *FILTERED, *more]


@pytest.fixture(scope="module")
def together(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    folder = tmp_path_factory.mktemp("together")
    run_pair(folder, ppo_runs.server_overrides(inputs), overrides(inputs))
    return result(folder)


def test_it_learns_the_same_in_turns(inputs, together, tmp_path) -> None:
    run_pair(tmp_path, ppo_runs.server_overrides(inputs), overrides(inputs, TURNS))
    assert result(tmp_path) == together
    rows = [row for row in metrics(tmp_path / "actor") if "placement/handover_seconds" in row]
    assert len(rows) == ppo_runs.STEPS

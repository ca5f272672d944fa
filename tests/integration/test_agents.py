"""A policy is trained with an environment: what it learns does not depend on engines, on lag's concurrency or on kills."""

import sys
from pathlib import Path

import pytest

from nemo_style_rlhf.launch.program import trainer
from tests.integration.test_engine_runs import result, wait_for_rollouts
from tests.support import ppo_runs, troubled_environment
from tests.support.agents import program
from tests.support.metrics import metrics, samples, without_timers
from tests.support.processes import Process, run_pair, start_actor, start_server


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ppo_runs.save_inputs(tmp_path_factory.mktemp("agents") / "inputs")


def overrides(inputs: Path, engines: int) -> list[str]:
    """Rewards of a reward model and of an environment in which a quarter of the episodes has trouble, values, and lag."""
    return [
        *ppo_runs.actor_overrides(inputs), "algorithm.staleness=1", f"generation.engines.count={engines}",
        "algorithm.correction.kind=tis", "checkpoint.keep_best=false", "algorithm.num_rollout_samples=32",
        f"agent.path={troubled_environment.__file__}", "agent.name=Troubled", "agent.step_timeout_s=2", "agent.attempts=2",
        "generation.max_length=16", "agent.max_turns=3", "agent.max_tokens=60", "checkpoint.save_hf=false",
    ]  # fmt: skip


@pytest.mark.parametrize("engines", [1, pytest.param(3, marks=pytest.mark.more)])
def test_engines_and_kills_learn_what_is_learned_one_after_another(inputs, tmp_path, engines: int) -> None:
    steps = 4
    alone, killed, last = tmp_path / "alone", tmp_path / "killed", f"algorithm.max_steps={steps}"
    run_pair(alone, ppo_runs.server_overrides(inputs), [*overrides(inputs, 0), last])

    critic, port = start_server(killed / "critic", *ppo_runs.server_overrides(inputs))
    actor = start_actor(killed / "actor", port, *overrides(inputs, engines), last)
    try:
        wait_for_rollouts(actor, killed / "actor", 3)
        actor.kill()
        actor = start_actor(killed / "actor", port, *overrides(inputs, engines), last)
        assert actor.wait(240) == 0, actor.output()
    finally:
        actor.kill()
        assert critic.terminate() == 0
    assert "resumed from step" in actor.output()
    assert result(killed, steps) == result(alone, steps)

    rows = [row for row in metrics(alone / "actor") if "train_rollouts/rewards" in row]
    assert sum(row["agent/retried_episodes"] for row in rows) > sum(row["agent/failed_episodes"] for row in rows) > 0
    assert sum(row["agent/timeouts"] for row in rows) > 0
    episodes = samples(alone / "actor")
    assert {len(each["turns"]) for each in episodes} == {0, 1, 2, 3}
    failed = [each for each in episodes if each["failed"]]
    assert len(failed) == sum(row["agent/failed_episodes"] for row in rows)
    assert not any(each["learned_tokens"] for each in failed)


PROGRAM = """
from concurrent.futures import ThreadPoolExecutor

def complete(prompt):
    return prompt + post("/completions", prompt=prompt, max_tokens=4)["choices"][0]["text"]

with ThreadPoolExecutor(2) as pool:  # two branches of an episode
    first, second = pool.map(complete, [TASK["prompt"], TASK["prompt"] + " w9"])
print(json.dumps({"reward": -len(complete(first + " w7").split()), "metrics": {"words": len(second.split())}}))
"""


def test_a_program_that_knows_only_an_endpoint_is_trained_on_all_branches_of_its_episodes(inputs, tmp_path) -> None:
    command = program(tmp_path / "my_agent.py", PROGRAM, python=sys.executable)
    learned = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        actor = Process(
            trainer(
                "train_ppo_actor", folder, *ppo_runs.actor_overrides(inputs), "reward=environment", "algorithm=reinforce_pp",
                f"agent.command=[{','.join(command)}]", "algorithm.max_steps=2", "algorithm.num_rollout_samples=8",
                "algorithm.critic_warmup_steps=0", "algorithm.val_check_interval=0", "checkpoint.keep_best=false",
                "checkpoint.save_hf=false", "checkpoint.export_critic=false",
                "agent.max_tokens=60",
            ),
            folder / "actor.log",
        )  # fmt: skip
        assert actor.wait(240) == 0, actor.output()
        weights = [path.read_bytes() for path in sorted((folder / "export").glob("*.safetensors"))]
        learned.append((without_timers(metrics(folder)), samples(folder), weights))
    assert learned[0] == learned[1] and learned[0][2]
    rows, episodes, _ = learned[0]
    assert [row["agent/branches"] for row in rows] == [2, 2]
    assert [row["agent/turns"] for row in rows] == [3, 3]
    assert len(episodes) == 2 * 2 * 8
    assert all(each["learned_tokens"] == each["response_tokens"] > 0 for each in episodes)
    assert sum(row["train_rollouts/learned_tokens"] for row in rows) == sum(each["learned_tokens"] for each in episodes)

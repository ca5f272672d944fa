"""What a second start may change about a PPO run, and what it says: both processes."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.metrics import metrics
from tests.support.models import save_policy, save_reward_model
from tests.support.processes import Process, start_actor, start_server

ACTOR = [
    "model=fp32", "run.num_threads=1", "engine.optim.lr=1e-3", "algorithm.num_rollout_samples=8", "generation.max_length=4",
    "generation.kv_cache_gib=0.1", "checkpoint.save_interval=1", "algorithm.max_steps=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume_inputs")
    save_policy(folder / "policy")
    save_policy(folder / "other", seed=4)
    save_reward_model(folder / "reward", reward_mean=0.1, reward_std=0.02)
    for name, first in (("prompts", 1), ("others", 2)):
        rows = [{"prompt": f"w{i + first} w{i}"} for i in range(20)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return [0.5] * len(queries)\n")
    return folder


def start(inputs: Path, folder: Path, port: int, *overrides: str) -> Process:
    where = [f"model.path={inputs / 'policy'}", f"data.train_path={inputs / 'prompts.jsonl'}"]
    return start_actor(folder, port, *ACTOR, *where, *overrides)


def serve(inputs: Path, folder: Path, *overrides: str) -> tuple[Process, int]:
    return start_server(
        folder, "model.dtype=float32", f"model.path={inputs / 'reward'}", "engine.optim.lr=1e-4", *overrides
    )


@pytest.fixture(scope="module")
def finished(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a critic, and one of two more with other learning rates, model and data in another folder."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "critic").mkdir()
    shutil.copytree(inputs / "policy", folder / "moved")
    shutil.copy(inputs / "prompts.jsonl", folder / "moved")
    moved = [f"model.path={folder / 'moved'}", f"data.train_path={folder / 'moved' / 'prompts.jsonl'}"]
    for server_changes, changes in (
        ([], []),
        (["engine.optim.lr=2e-4"], [*moved, "engine.optim.lr=5e-4", "algorithm.max_steps=4", "tracking.progress=true"]),
    ):
        server, port = serve(inputs, folder / "critic", *server_changes)
        actor = start(inputs, folder / "actor", port, *changes)
        try:
            assert actor.wait(200) == 0, actor.output()
        finally:
            actor.kill()
            assert server.terminate() == 0
    return folder


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "configs").iterdir())


def test_both_say_what_was_changed_and_keep_both_configurations(finished: Path) -> None:
    actor, server = (
        (finished / half / f"{log}.log").read_text() for half, log in (("actor", "actor"), ("critic", "server"))
    )
    for line in (
        "engine.optim.lr: 0.001 -> 0.0005",
        "algorithm.max_steps: 2 -> 4",
        "model.path: ",
        "data.train_path: ",
    ):
        assert actor.count(f"  {line}") == 1, line
    assert actor.index("engine.optim.lr: 0.001") < actor.index("resumed from step 2")
    assert server.count("  engine.optim.lr: 0.0001 -> 0.0002") == 1
    rates = [row["train_optim/lr"] for row in metrics(finished / "actor")]
    assert rates == [1e-3, 1e-3, 5e-4, 5e-4]
    assert kept(finished / "actor") == ["001_step_000000.yaml", "002_step_000002.yaml"]
    first, second = kept(finished / "critic")
    assert first == "001_step_000000.yaml" and re.fullmatch(r"002_[0-9a-f]{12}-step_000002\.yaml", second)
    for half in ("actor", "critic"):
        newest = (finished / half / "config.yaml").read_bytes()
        assert newest == (finished / half / "configs" / kept(finished / half)[1]).read_bytes()


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.seed=5", r"run\.seed 1234, this one has 5"),
        ("data.shuffle=false", r"data\.shuffle True, this one has False"),
        ("data.train_path={inputs}/others.jsonl", r"training prompts 20 rows, sha256 \w+, this one has 20 rows"),
        ("data.prompt_template='w9 {{prompt}}'", r"training prompts 20 rows"),
        ("model.path={inputs}/other", r"the model in model\.path sha256 \w+, this one has sha256"),
        ("run.resume=never", "holds checkpoints"),
    ],
)
def test_what_would_make_the_checkpoint_a_lie_is_refused(
    inputs: Path, finished: Path, override: str, said: str, dry_run: list[str]
) -> None:
    """Before a model is loaded or the server, of which there is none, is asked; the configuration stays the last one that ran."""
    before = (finished / "actor" / "config.yaml").read_bytes()
    actor = start(inputs, finished / "actor", 9, "algorithm.max_steps=5", override.format(inputs=inputs), *dry_run)
    assert actor.wait(60) == 2, actor.output()
    sentence = [line for line in actor.output().splitlines() if line.startswith("error: ")][-1]
    assert re.search(said, sentence), sentence
    assert "choose another run.output_dir" in sentence or override == "run.resume=never"
    assert (finished / "actor" / "config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("override", "said"),
    [("reward_model.normalize_rewards=true", "reward_model.normalize_rewards False, this one has True"),
     ("model.lora.alpha=8", "model.lora.alpha 16, this one has 8")],
)  # fmt: skip
def test_a_server_restores_no_critic_of_another_scale(
    inputs: Path, finished: Path, tmp_path: Path, override: str, said: str
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    server, port = serve(inputs, tmp_path / "critic", override)
    actor = start(inputs, tmp_path / "actor", port, "algorithm.max_steps=5")
    try:
        assert actor.wait(120) == 2, actor.output()
    finally:
        actor.kill()
        server.terminate()
    assert "no checkpoint can be restored" in actor.output() and f"is of a critic with {said}" in actor.output()


def test_a_run_without_a_critic_gets_none_and_one_that_has_ended_says_so(inputs: Path, tmp_path: Path) -> None:
    settings = [
        "algorithm=grpo", "algorithm.samples_per_prompt=4", "reward=function", f"reward.function.path={inputs / 'reward.py'}",
        "algorithm.max_steps=1",
    ]  # fmt: skip
    assert start(inputs, tmp_path, 9, *settings).wait(120) == 0
    refused = start(inputs, tmp_path, 9)
    assert refused.wait(60) == 2 and "step_000001 is of a run without a critic server" in refused.output()
    export = tmp_path / "export" / "model.safetensors"
    before, seen = export.stat(), len(refused.output())
    assert start(inputs, tmp_path, 9, *settings).wait(60) == 0
    said = refused.output()[seen:]
    assert "to train on raise algorithm.max_steps" in said and "rows kept" not in said
    assert export.stat() == before and kept(tmp_path) == ["001_step_000000.yaml"]
    export.unlink()
    assert start(inputs, tmp_path, 9, *settings).wait(120) == 0 and export.exists()
    longer = start(inputs, tmp_path, 9, *settings, "algorithm.max_steps=2")
    assert longer.wait(120) == 0 and "resumed from step 1" in longer.output()
    assert kept(tmp_path) == ["001_step_000000.yaml", "002_step_000001.yaml"]

"""Forwards are compiled in both processes: a run that resumes, and so sees other shapes first, ends with the same bits."""

import json
from pathlib import Path

import pytest

from nemo_style_rlhf.checkpoint.files import file_digests
from tests.support.metrics import metrics, without_timers
from tests.support.models import save_policy, save_reward_model
from tests.support.processes import run_pair

pytestmark = pytest.mark.more

COMMON = [
    "model.compile=true", "model.dtype=float32", "run.num_threads=2", "engine.optim.lr=2e-3", "engine.micro_batch_tokens=256",
]  # fmt: skip
ACTOR = [
    *COMMON, "generation=hf", "generation.max_length=12", "algorithm.num_rollout_samples=32", "algorithm.mini_batches=2",
    "checkpoint.save_interval=1", "checkpoint.export_critic=true",
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compile_inputs")
    save_policy(folder / "policy", num_hidden_layers=1)
    save_reward_model(folder / "reward", num_hidden_layers=1)
    rows = [{"prompt": " ".join(f"w{(7 * i + j) % 62}" for j in range(2 + 3 * (i % 7)))} for i in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(inputs: Path, folder: Path, steps: int) -> tuple[object, ...]:
    """Train for ``steps`` in all, and return everything that both processes have learned and logged."""
    where = [f"model.path={inputs / 'policy'}", f"data.train_path={inputs / 'train.jsonl'}"]
    server = [*COMMON, f"model.path={inputs / 'reward'}"]
    run_pair(folder, server, [*ACTOR, *where, f"algorithm.max_steps={steps}"])
    (critic,) = (folder / "critic" / "exports").glob(f"*{steps}/critic")
    return without_timers(metrics(folder / "actor")), file_digests(folder / "actor" / "export"), file_digests(critic)


def test_a_compiled_run_that_resumes_ends_with_the_same_bits(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    whole = run(inputs, tmp_path / "whole", steps=2)
    run(inputs, tmp_path / "cut", steps=1)
    assert run(inputs, tmp_path / "cut", steps=2) == whole
    assert "resumed from step 1" in (tmp_path / "cut" / "actor" / "actor.log").read_text()
    rows = metrics(tmp_path / "whole" / "actor")
    assert len(rows) == 2 and rows[1]["train_rollouts/init_policy_kl"] != 0
    assert all(row["train_optim/ratio_error_first_mini_batch"] < 1e-5 for row in rows)

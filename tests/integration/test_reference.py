"""Runs whose reference is a model of its own: what they log is its KL, and no other reference takes its place."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import warm
from tests.support.metrics import metrics, samples, without_timers
from tests.support.models import WORDS, save_policy, save_run_inputs
from tests.support.processes import Process, start_actor

REWARD = "def reward_func(queries, prompts, labels):\n    return [len(set(query.split())) / 20 for query in queries]\n"
COMMON = [
    "model=fp32", "run.num_threads=1", "engine.optim.lr=2e-3", "algorithm=reinforce_pp", "reward=function",
    "algorithm.max_steps=2", "algorithm.num_rollout_samples=32", "algorithm.mini_batches=2", "generation.max_length=12",
    "generation.kv_cache_gib=0.1", "checkpoint.save_interval=1", "checkpoint.save_hf=true",
]  # fmt: skip
ADAPTERS = ["model.lora.rank=4", "engine.optim.lr=5e-3"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A policy and its copy, and a reference of another size, whose embeddings have rows that no token uses."""
    rows = [{"prompt": " ".join(f"w{(2 + 7 * i + j) % 62}" for j in range(2 + 5 * (i % 5)))} for i in range(30)]
    folder = save_run_inputs(tmp_path_factory.mktemp("inputs"), REWARD, rows)
    shutil.copytree(folder / "policy", folder / "copy")
    save_policy(folder / "other", seed=4, num_hidden_layers=1, vocab_size=len(WORDS) + 8)
    return folder


def start(inputs: Path, folder: Path, *overrides: str) -> Process:
    return start_actor(
        folder, 9, *COMMON, f"model.path={inputs / 'policy'}", f"data.train_path={inputs / 'rows.jsonl'}",
        f"reward.function.path={inputs / 'reward.py'}", *overrides,
    )  # fmt: skip


def run(inputs: Path, folder: Path, *overrides: str) -> Path:
    actor = start(inputs, folder, *overrides)
    try:
        assert actor.wait(180) == 0, actor.output()
    finally:
        actor.kill()
    return folder


def refusal(inputs: Path, folder: Path, *overrides: str) -> str:
    """The last line of the log, to which starts in the same folder append."""
    actor = start(inputs, folder, *overrides)
    assert actor.wait(60) == 2, actor.output()
    assert "Traceback" not in actor.output()
    return actor.output().splitlines()[-1]


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory) -> Path:
    return run(inputs, tmp_path_factory.mktemp("run"), f"model.reference_path={inputs / 'other'}")


@pytest.mark.parametrize("settings", [[], ADAPTERS], ids=["all weights", "adapters"])
def test_the_start_as_reference_path_changes_no_bit(settings, inputs, tmp_path):
    """Nor does it bind a run: without the key, the same run goes on."""
    copied = [*settings, f"model.reference_path={inputs / 'copy'}"]
    plain = run(inputs, tmp_path / "plain", *settings)
    given = run(inputs, tmp_path / "given", *copied, "algorithm.max_steps=1")
    run(inputs, given, *settings)
    assert "resumed from step 1" in (given / "actor.log").read_text()
    assert without_timers(metrics(given)) == without_timers(metrics(plain))
    assert metrics(given)[-1]["train_rollouts/init_policy_kl"] > 1e-4
    exports = [folder / "export" / "model.safetensors" for folder in (given, plain)]
    assert exports[0].read_bytes() == exports[1].read_bytes()


def logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of every token but the first, as transformers alone computes them."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        every = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return every.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def kl_of_responses(reference: Path, folder: Path, policies: list[Path]) -> tuple[list[float], list[float]]:
    """KL to ``reference`` of the responses of a run whose step k sampled from ``policies[k - 1]``: as logged, and as transformers
    computes it."""
    logged, computed = [], []
    for step, policy in enumerate(policies, start=1):
        for row in rollout(folder, step):
            prompt, response = ([WORDS.index(word) for word in row[name].split()] for name in ("prompt", "response"))
            response += [0] * (row["finish_reason"] == "stop")
            if len(response) == row["response_tokens"]:  # else a special token inside has no text
                ratios = logprobs(policy, [*prompt, *response]) - logprobs(reference, [*prompt, *response])
                logged.append(row["kl_sum"])
                computed.append(float(ratios[-len(response) :].sum()))
    return logged, computed


def rollout(folder: Path, step: int) -> list[dict[str, Any]]:
    return samples(folder, step)


def kl_per_token(folder: Path, step: int) -> float:
    rows = rollout(folder, step)
    return sum(row["kl_sum"] for row in rows) / sum(row["response_tokens"] for row in rows)


@pytest.mark.parametrize("settings", [[], ["model.reference=cpu_offload", *ADAPTERS]], ids=["all weights", "adapters"])
def test_the_logged_kl_is_that_to_the_other_model(settings, inputs, finished, tmp_path):
    """With adapters, whose reference is else the model without them, the other one is loaded into host memory."""
    other = f"model.reference_path={inputs / 'other'}"
    folder = run(inputs, tmp_path / "run", other, *settings) if settings else finished
    policies = [inputs / "policy", folder / "checkpoints" / "step_000001" / "hf"]
    logged, computed = kl_of_responses(inputs / "other", folder, policies)
    assert logged == pytest.approx(computed, abs=1e-4)
    assert len(logged) > sum(len(rollout(folder, step)) for step in (1, 2)) / 2
    of_steps = [kl_per_token(folder, step) for step in (1, 2)]
    assert [row["train_rollouts/init_policy_kl"] for row in metrics(folder)] == pytest.approx(of_steps, abs=1e-5)
    assert min(of_steps) > 0.1


@pytest.mark.parametrize("reference", ["null", "{inputs}/policy"])
def test_a_run_is_not_resumed_with_another_reference(reference, inputs, finished):
    other = f"model.reference_path={reference.format(inputs=inputs)}"
    error = refusal(inputs, finished, other, "algorithm.max_steps=3")
    assert error.startswith("error: ") and "is of a run with the KL reference (model.reference_path) sha256 " in error
    assert "resume it as it was, or choose another run.output_dir" in error
    assert not (finished / "checkpoints" / "step_000003").exists()


def test_a_reference_that_cannot_be_compared_is_refused_before_anything_starts(inputs, tmp_path):
    small = save_policy(tmp_path / "small", vocab_size=len(WORDS) - 1)
    error = refusal(inputs, tmp_path / "run", f"model.reference_path={small}")
    assert f"{small} has a vocabulary of {len(WORDS) - 1} ids but the policy in" in error
    error = refusal(inputs, tmp_path / "run", "model.reference_path=./nowhere")
    assert "model.reference_path=./nowhere: there is no such folder" in error
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.more
def test_a_dry_run_and_the_plan_take_the_reference(inputs, tmp_path):
    other = f"model.reference_path={inputs / 'other'}"
    actor = start(inputs, tmp_path / "run", other, "--dry-run")
    assert actor.wait(180) == 0, actor.output()
    done = warm.run(
        ["trainers/plan.py", f"model.path={inputs / 'policy'}", other, "run.device=cpu", "generation.max_length=8"],
        timeout=120,
    )
    assert done.returncode == 0 and "reference" in done.stdout, done.stderr

"""PPO with adapters on both sides, packed: the reference is the policy without them, and a resumed run ends the same."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from nemo_style_rlhf.checkpoint.files import file_digests
from tests.support import operators, warm
from tests.support.metrics import metrics, samples
from tests.support.models import WORDS, save_policy, save_reward_model
from tests.support.processes import run_pair, start_actor

LORA = ["model.lora.rank=4", "model.packing=true", "run.num_threads=1"]
ACTOR = [
    *LORA, "model=fp32", "engine.optim.lr=5e-3", "algorithm.num_rollout_samples=32", "algorithm.mini_batches=2",
    "generation.max_length=12", "generation.kv_cache_gib=0.1", "checkpoint.save_interval=2", "checkpoint.export_critic=true",
    "checkpoint.save_hf=true",
]  # fmt: skip
SERVER = [*LORA, "model.dtype=float32", "engine.optim.lr=5e-3", "reward_model.normalize_rewards=true"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora_inputs")
    save_policy(folder / "policy")
    save_reward_model(folder / "reward", reward_mean=0.1, reward_std=0.02)
    rows = [{"prompt": " ".join(f"w{(7 * i + j) % 62}" for j in range(2 + i % 5))} for i in range(30)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def actor_overrides(inputs: Path, steps: int) -> list[str]:
    where = [f"model.path={inputs / 'policy'}", f"data.train_path={inputs / 'train.jsonl'}"]
    return [*ACTOR, *where, f"algorithm.max_steps={steps}"]


def run(inputs: Path, folder: Path, steps: int) -> Path:
    recorded = {operators.VARIABLE: str(folder / "operators.json")}
    run_pair(folder, [*SERVER, f"model.path={inputs / 'reward'}"], actor_overrides(inputs, steps), environment=recorded)
    return folder


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory) -> Path:
    return run(inputs, tmp_path_factory.mktemp("lora_run"), steps=4)


def test_packed_sequences_and_adapters_need_no_operator_that_raises_on_a_gpu(finished: Path) -> None:
    assert not operators.refused(finished / "operators.json")


def test_the_reference_is_the_policy_without_its_adapter(finished: Path) -> None:
    rows = metrics(finished / "actor")
    assert abs(rows[0]["train_rollouts/init_policy_kl"]) < 1e-4
    assert rows[-1]["train_rollouts/init_policy_kl"] > 1e-3
    for row in rows:
        assert row["train_rollouts/sampler_logprob_gap_max"] < 1e-3  # vLLM has the merged weights
        assert row["train_optim/ratio_error_first_mini_batch"] < 1e-5


def test_rewards_are_normalised_by_the_models_own_statistics(inputs: Path, finished: Path) -> None:
    """The scores that the reward model gives are (r - 0.1) / 0.02 on the wire."""
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "reward").eval()
    for row in samples(finished / "actor", 1)[:4]:
        ids = [WORDS.index(word) for word in f"{row['prompt']} {row['response']}".split()]
        with torch.no_grad():
            score = float(model(torch.tensor([ids])).logits)
        assert row["reward"] == pytest.approx((score - 0.1) / 0.02, abs=1e-3)


def test_exports_are_plain_models_and_the_adapter_alone(inputs: Path, finished: Path) -> None:
    ids = torch.arange(2, 12)[None]
    base = AutoModelForCausalLM.from_pretrained(inputs / "policy")
    exported = AutoModelForCausalLM.from_pretrained(finished / "actor" / "export")
    assert exported.state_dict().keys() == base.state_dict().keys()
    with torch.no_grad():
        expected, before = exported(ids).logits, base(ids).logits
        adapter = PeftModel.from_pretrained(base, finished / "actor" / "export_adapter").eval()
        torch.testing.assert_close(adapter(ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert (expected - before).abs().max() > 1e-3
    for name in ("", "_adapter"):
        saved = finished / "actor" / "checkpoints" / "step_000004" / f"hf{name}"
        assert file_digests(saved) == file_digests(finished / "actor" / f"export{name}")
    (critic,) = (finished / "critic" / "exports").glob("*/critic")
    assert AutoModelForSequenceClassification.from_pretrained(critic).config.reward_mean == 0.1


def test_a_critics_adapter_is_merged_into_its_checkpoints_conversion(finished: Path, tmp_path: Path) -> None:
    (export,) = (finished / "critic" / "exports").glob("*/critic")
    checkpoint = finished / "critic" / "checkpoints" / export.parent.name
    converted = warm.run(["trainers/export_checkpoint.py", str(checkpoint), str(tmp_path / "critic")], timeout=120)
    assert converted.returncode == 0, converted.stderr
    assert file_digests(tmp_path / "critic") == file_digests(export)


def test_checkpoints_hold_adapters_and_a_resumed_run_ends_with_the_same_weights(
    inputs: Path, finished: Path, tmp_path: Path
) -> None:
    (saved,) = (finished / "actor" / "checkpoints" / "step_000004").rglob("mp_rank_00_model_states.pt")
    names = torch.load(saved, weights_only=False)["module"]
    assert names and all("lora_" in name for name in names)
    run(inputs, tmp_path, steps=2)
    run(inputs, tmp_path, steps=4)
    whole = load_file(finished / "actor" / "export" / "model.safetensors")
    resumed = load_file(tmp_path / "actor" / "export" / "model.safetensors")
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name


@pytest.mark.more
@pytest.mark.parametrize(
    ("override", "was", "given"),
    [("model.lora.alpha=32", "'alpha': 16", "'alpha': 32"), ("model.dtype=bfloat16", "dtype float32", "has bfloat16")],
)
def test_a_run_is_not_resumed_with_other_adapters_or_dtype(
    inputs: Path, finished: Path, override: str, was: str, given: str
) -> None:
    """The checkpoint holds neither alpha nor the model that the adapters belong to."""
    actor = start_actor(finished / "actor", 9, *actor_overrides(inputs, 5), override)
    assert actor.wait(60) == 2
    assert was in actor.output() and given in actor.output()
    assert "resume it as it was, or choose another run.output_dir" in actor.output()

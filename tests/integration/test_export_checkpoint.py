"""A checkpoint of the last step, converted, is the run's export, file by file."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from nemo_style_rlhf.checkpoint.files import file_digests
from tests.support import warm
from tests.support.models import save_policy, save_reward_model
from tests.support.supervised_runs import train

STAGE = ["trainer.batch_size=8", "trainer.max_steps=3", "engine.optim.lr=1e-3", "tracking.progress=false"]
REWARD = "def reward_func(queries, prompts, labels):\n    return [len(set(query.split())) for query in queries]\n"
PPO = [
    "run.num_threads=1", "algorithm=grpo", "algorithm.num_rollout_samples=16", "algorithm.max_steps=2", "generation=hf",
    "generation.max_length=8", "reward=function", "engine.optim.lr=1e-2",
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with tied weights and dropout, a reward model, rows of every kind."""
    folder = tmp_path_factory.mktemp("inputs")
    save_policy(folder / "policy", tie_word_embeddings=True, attention_dropout=0.1)
    save_reward_model(folder / "reward")
    rows = [
        {"prompt": f"w{i} w{i + 1}", "response": f"w{i + 2}", "chosen": f"w{i + 3}", "rejected": f"w{i + 4} w{i + 5}"}
        for i in range(40)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "template.txt").write_text("w60 ${w1} {prompt} w61")
    return folder


def convert(checkpoint: Path, target: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return warm.run(["trainers/export_checkpoint.py", str(checkpoint), str(target), *more], timeout=120)


@pytest.mark.parametrize(
    ("script", "settings", "ranks"),
    [
        ("train_sft", ["data.prompt_template=@{inputs}/template.txt", "model.dtype=float32"], 1),
        ("train_sft", ["trainer.strategy=zero2", "model.lora.rank=2"], 1),
        ("train_sft", ["model.init=random", "trainer.strategy=zero3"], 2),
        ("train_reward_model", ["statistics_pairs=0", "model.lora.rank=2"], 1),
        ("train_reward_model", ["statistics_pairs=0", "trainer.strategy=zero3"], 2),
        ("train_dpo", ["model.lora.rank=2", "trainer.strategy=zero3"], 1),
        ("train_dpo", ["trainer.strategy=zero1"], 1),
        ("train_kto", [], 1),
    ],
)
def test_of_a_supervised_stage(inputs: Path, tmp_path: Path, script: str, settings: list[str], ranks: int) -> None:
    """Its only checkpoint is that of the last step, with save_interval=-1."""
    start = "reward" if script == "train_reward_model" else "policy"
    where = [
        f"run.output_dir={tmp_path / 'run'}",
        f"model.path={inputs / start}",
        f"data.train_path={inputs / 'rows.jsonl'}",
    ]
    done = train(
        script,
        *where,
        *STAGE,
        *(setting.replace("{inputs}", str(inputs)) for setting in settings),
        "checkpoint.save_interval=-1",
        ranks=ranks,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name == "step_00000003.ckpt"
    converted = convert(checkpoint, tmp_path / "converted")
    assert converted.returncode == 0, converted.stderr
    for name in ("", "_adapter") if "model.lora.rank=2" in settings else ("",):
        assert file_digests(tmp_path / f"converted{name}") == file_digests(tmp_path / "run" / f"export{name}")


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        (["engine.zero_stage=3", "model.dtype=bfloat16", "checkpoint.save_hf=true"], 2),
        (["engine.zero_stage=0", "model.dtype=bfloat16"], 1),
        (["engine.zero_stage=2", "model=fp32", "model.lora.rank=2", "checkpoint.save_hf=true"], 2),
    ],
)
def test_of_the_actor(inputs: Path, tmp_path: Path, settings: list[str], ranks: int) -> None:
    """With save_interval=-1, step 0, to which a run goes back that loses its server, is the only earlier one. The part `hf` of
    the checkpoint is the same, too."""
    run = tmp_path / "run"
    where = [
        f"run.output_dir={run}", f"model.path={inputs / 'policy'}", f"data.train_path={inputs / 'rows.jsonl'}",
        f"reward.function.path={inputs / 'reward.py'}", "checkpoint.save_interval=-1",
    ]  # fmt: skip
    done = warm.run(["trainers/train_ppo_actor.py", *where, *PPO, *settings], timeout=240, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000000", "step_000002"]
    exported = file_digests(run / "export")
    for step, name in ((2, "last"), (0, "first")):
        converted = convert(run / "checkpoints" / f"step_{step:06d}", tmp_path / name)
        assert converted.returncode == 0, converted.stderr
    assert file_digests(tmp_path / "last") == exported
    assert file_digests(tmp_path / "first")["model.safetensors"] != exported["model.safetensors"]
    saved = run / "checkpoints" / "step_000002" / "hf"
    assert saved.is_dir() == ("checkpoint.save_hf=true" in settings)
    if saved.is_dir():
        assert file_digests(saved) == exported
    if "model.lora.rank=2" in settings:
        assert file_digests(tmp_path / "last_adapter") == file_digests(run / "export_adapter")
        assert file_digests(saved.with_name("hf_adapter")) == file_digests(run / "export_adapter")
        shutil.move(inputs / "policy", inputs / "moved")
        refused = convert(run / "checkpoints" / "step_000002", tmp_path / "other")
        assert refused.returncode == 2 and "policy" in refused.stderr and "Traceback" not in refused.stderr
        wrong = convert(
            run / "checkpoints" / "step_000002",
            tmp_path / "other",
            "--model",
            str(save_policy(tmp_path / "wrong", seed=9)),
        )
        assert wrong.returncode == 2 and "has adapters of a model with sha256" in wrong.stderr
        again = convert(run / "checkpoints" / "step_000002", tmp_path / "other", "--model", str(inputs / "moved"))
        assert again.returncode == 0, again.stderr
        shutil.move(inputs / "moved", inputs / "policy")
        assert file_digests(tmp_path / "other") == exported

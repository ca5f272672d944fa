"""Runs on a mixture of sources: killed and resumed they end with the same bits, and another mixture is not resumed."""

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_style_rlhf.data.mixtures import IDS_PER_SOURCE
from tests.support import warm
from tests.support.metrics import metrics, samples, without_timers
from tests.support.models import save_chat_tokenizer, save_policy
from tests.support.processes import start_actor

PPO = [
    "model=fp32", "run.num_threads=1", "engine.optim.lr=1e-3", "algorithm=grpo", "algorithm.samples_per_prompt=2",
    "algorithm.num_rollout_samples=16", "algorithm.max_steps=6", "generation.max_length=4", "generation.kv_cache_gib=0.1",
    "checkpoint.save_interval=2", "reward=function",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with a chat template, and three sources: texts in a gzip file and Parquet, ShareGPT's conversations."""
    import datasets

    folder = tmp_path_factory.mktemp("mixtures")
    save_policy(folder / "policy")
    save_chat_tokenizer(folder / "policy")
    (folder / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [float(len(set(query.split()))) for query in queries]\n"
    )
    texts = [{"prompt": f"w{row} w3", "response": f"w{row + 1} w4"} for row in range(20)]
    datasets.Dataset.from_list(texts).to_parquet(str(folder / "texts.parquet"))
    (folder / "few.json").write_text(json.dumps([{"instruction": "w50", "input": "w51", "output": "w52"}] * 3))
    turns = [{"from": "human", "value": "w40 w41"}, {"from": "gpt", "value": "w42 w43"}]
    (folder / "chat.jinja").write_text("{% for m in messages %} {{ m.content }}{% endfor %}")
    (folder / "turns.jsonl").write_text(json.dumps({"conversations": turns}) + "\n" + '{"conversations": []}\n')
    return folder


def mixture(folder: Path, *weights: float) -> str:
    paths = ("texts.parquet", "few.json", "turns.jsonl")
    sources = ",".join(
        f"{{path: {folder / path}, weight: {weight}}}" for path, weight in zip(paths, weights, strict=True)
    )
    return f"data.mixture=[{sources}]"


def assert_equal(left: Path, right: Path) -> None:
    weights, others = (load_file(run / "export" / "model.safetensors") for run in (left, right))
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
    assert without_timers(metrics(left)) == without_timers(metrics(right))


def test_a_killed_ppo_run_goes_on_in_its_mixture(folder: Path) -> None:
    settings = [
        *PPO, f"model.path={folder / 'policy'}", f"reward.function.path={folder / 'reward.py'}", "data.apply_chat_template=true",
    ]  # fmt: skip

    def start(run: str, *weights: float):
        return start_actor(folder / run, 9, *settings, mixture(folder, *weights))

    for run in ("whole", "killed"):
        (folder / run).mkdir()
    whole = start("whole", 5, 2, 1)
    assert whole.wait(200) == 0, whole.output()
    assert (
        "turns.jsonl (12.5% of the mixture): 1 rows kept, 1 of them cut before the answer they end with"
        in whole.output()
    )
    killed, reached = start("killed", 5, 2, 1), folder / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (reached.exists() and len(reached.read_text().splitlines()) >= 3):
        assert time.monotonic() < deadline, killed.output()
        time.sleep(0.01)
    killed.kill()
    refused = start("killed", 5, 2, 2)
    assert refused.wait(100) == 2 and "data.mixture" in refused.output()
    resumed = start("killed", 5, 2, 1)
    assert resumed.wait(200) == 0, resumed.output()
    assert_equal(folder / "whole", folder / "killed")
    sources = [row["prompt_id"] // IDS_PER_SOURCE for row in samples(folder / "whole")]
    assert set(sources) == {0, 1, 2} and len(sources) == 96


def test_a_resumed_sft_run_goes_on_in_its_mixture(folder: Path) -> None:
    def train(run: str, *weights: float):
        return warm.run(
            [
                "trainers/train_sft.py", "run.num_threads=1", f"run.output_dir={folder / run}", f"model.path={folder / 'policy'}",
                "model.dtype=float32", "engine.optim.lr=1e-3", "trainer.batch_size=8", "trainer.max_steps=6",
                "trainer.log_interval=1", "checkpoint.save_interval=2", "checkpoint.keep_last=9",
                f"data.chat_template={folder / 'chat.jinja'}", mixture(folder, *weights),
            ],
            timeout=300,
        )  # fmt: skip

    for run in ("sft", "sft_cut"):
        done = train(run, 5, 2, 1)
        assert done.returncode == 0, done.stderr
    assert (
        "turns.jsonl (12.5% of the mixture): 1 rows kept, 1 dropped (1 whose 'conversations' is not a list"
        in done.stderr
    )
    checkpoints = sorted((folder / "sft_cut" / "checkpoints").glob("*.ckpt"))
    for checkpoint in checkpoints[1:]:  # as if it had been killed before
        checkpoint.unlink()
    refused = train("sft_cut", 5, 2, 2)
    assert refused.returncode == 2 and "data.mixture" in refused.stderr
    resumed = train("sft_cut", 5, 2, 1)
    assert resumed.returncode == 0, resumed.stderr
    assert_equal(folder / "sft", folder / "sft_cut")

"""A short PPO run: its models and prompts, the settings of both processes."""

import json
import re
from pathlib import Path

from tests.support.metrics import metrics, without_timers
from tests.support.models import save_policy, save_reward_model

STEPS = 6
LAUNCHED_STEPS = 5
SERVER = [
    "model.dtype=float32", "run.num_threads=1", "engine.optim.lr=1e-3",
    "engine.scheduler.name=linear", "engine.scheduler.total_steps=24",
]  # fmt: skip
ACTOR = [
    "model=fp32", "run.num_threads=1", "engine.optim.lr=2e-3", "engine.scheduler.name=cosine", "engine.micro_batch_tokens=256",
    f"algorithm.max_steps={STEPS}", "algorithm.num_rollout_samples=48", "algorithm.samples_per_prompt=2",
    "algorithm.mini_batches=2", "algorithm.ppo_epochs=2", "algorithm.critic_warmup_steps=1",
    "algorithm.val_check_interval=3", "algorithm.num_val_samples=8", "algorithm.entropy_bonus=0.001",
    "generation.max_length=12", "generation.kv_cache_gib=0.1", "checkpoint.save_interval=2", "checkpoint.keep_last=2",
    "checkpoint.export_critic=true", "checkpoint.keep_best=true", "algorithm.kl_target=0.02", "algorithm.kl_horizon=500",
    "algorithm.shaping.normalize=running", "algorithm.val_samples_per_prompt=2", "algorithm.val_pass_score=0.0",
    "checkpoint.save_hf=true", "remote_critic_rm.max_request_bytes=4096", "tracking.tensorboard=true",
    "generation.max_num_seqs=20", "generation.max_num_batched_tokens=20",  # vLLM splits prompts in every rollout
]  # fmt: skip


def save_inputs(folder: Path) -> Path:
    """A policy with dropout in its config, a reward model, prompts."""
    folder.mkdir(exist_ok=True)
    save_policy(folder / "policy", attention_dropout=0.1)
    save_reward_model(folder / "reward")
    for name, start in (("train", 2), ("val", 30)):
        rows = [{"prompt": " ".join(f"w{(start + 7 * i + j) % 62}" for j in range(2 + 5 * (i % 5)))} for i in range(30)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def server_overrides(inputs: Path) -> list[str]:
    return [*SERVER, f"model.path={inputs / 'reward'}"]


def actor_overrides(inputs: Path) -> list[str]:
    return [*ACTOR, f"model.path={inputs / 'policy'}", *(f"data.{n}_path={inputs / n}.jsonl" for n in ("train", "val"))]


def launched_actor(inputs: Path) -> list[str]:
    """Of a run with an engine, whose processes one command starts."""
    # An engine loads in seconds, a lost server is noticed in one.
    quick = ["generation=hf", "remote_critic_rm.retries=1"]
    return [*actor_overrides(inputs), f"algorithm.max_steps={LAUNCHED_STEPS}", "generation.engines.count=1", *quick]


def launched(inputs: Path) -> list[str]:
    """Both programs' settings as that command takes them."""
    return [*launched_actor(inputs), *(f"critic.{word}" for word in server_overrides(inputs))]


def result(folder: Path) -> tuple[object, ...]:
    """Everything that a run has learned and logged."""
    actor = folder / "actor"
    files = [*sorted((actor / "rollouts").glob("*.parquet")), *sorted((actor / "export").glob("*.safetensors"))]
    exported = sorted((folder / "critic").rglob("*.safetensors"))
    assert len(files) == LAUNCHED_STEPS + 1 and exported
    return without_timers(metrics(actor)), [path.read_bytes() for path in [*files, *exported]]


def segments(folder: Path, servers: list[int]) -> list[str]:
    """Files in /dev/shm of the run and of its critic servers."""
    ids = {json.loads(path.read_text())["run_id"] for path in folder.glob("actor/checkpoints/*/manifest.json")}
    own = re.compile("|".join([*(rf"nsr-{run_id}-" for run_id in ids), *(rf"nsr{pid}-" for pid in servers)]))
    return [path.name for path in Path("/dev/shm").iterdir() if own.match(path.name)]


def left_on_disk(folder: Path) -> list[Path]:
    return [*folder.rglob("ready*.json"), *folder.glob("actor/engines/*.json")]

"""PPO jobs on the emulated cluster: `sbatch slurm/ppo_hetjob.sh` as it stands, with tiny models."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.slurm import ENDED, Cluster, wait_until
from tests.support.models import save_policy, save_reward_model
from tests.support.paths import ROOT

LOADING_S = 180.0
STEPS = 40
CRITIC = [
    "model.dtype=float32", "run.num_threads=1", "engine.optim.lr=1e-3", "engine.zero_stage=0",
]  # fmt: skip
ACTOR = [
    "model=fp32", "run.num_threads=1", "engine.optim.lr=2e-3", "engine.zero_stage=0",
    f"algorithm.max_steps={STEPS}", "algorithm.num_rollout_samples=32", "algorithm.samples_per_prompt=2",
    "algorithm.mini_batches=2", "generation.max_length=8", "generation.kv_cache_gib=0.1", "checkpoint.save_interval=1000",
]  # fmt: skip


@dataclass
class Overrides:
    """Of both programs."""

    critic: list[str]
    actor: list[str]

    @property
    def endless(self) -> "Overrides":
        """The same run, which does not end by itself while a test lasts."""
        return Overrides(self.critic, [*self.actor, "algorithm.max_steps=100000"])


def tiny(folder: Path) -> Overrides:
    """A policy, a reward model and prompts are made in ``folder``."""
    save_policy(folder / "policy")
    save_reward_model(folder / "reward")
    rows = [{"prompt": " ".join(f"w{(2 + 7 * i + j) % 62}" for j in range(2 + i % 5))} for i in range(30)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Overrides(
        [*CRITIC, f"model.path={folder / 'reward'}"],
        [*ACTOR, f"model.path={folder / 'policy'}", f"data.train_path={folder / 'prompts.jsonl'}"],
    )


@dataclass
class Job:
    """One submission of slurm/ppo_hetjob.sh."""

    cluster: Cluster
    output_dir: Path
    number: int
    """Slurm's id of the job and of its component 0."""

    @property
    def log(self) -> Path:
        return self.output_dir.with_suffix(".log")

    def fields(self, component: int = 0) -> dict[str, str]:
        """What `scontrol show job` says of a component."""
        return self.cluster.job(self.number, component)

    @property
    def state(self) -> str:
        return self.fields()["JobState"]

    def rows(self) -> list[dict[str, float]]:
        """metrics.jsonl so far; a last line that is still being written does not count."""
        path = self.output_dir / "actor" / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_step(self, step: int) -> None:
        def there() -> bool:
            assert self.state not in ENDED, self.report()
            return len(self.rows()) >= step

        wait_until(there, f"step {step}", LOADING_S)

    def wait_for_requeue(self, timeout_s: float) -> None:
        def there() -> bool:
            fields = self.fields()
            assert fields["JobState"] not in ENDED, self.report()
            return fields["JobState"] == "PENDING" and fields["Restarts"] == "1"

        wait_until(there, "the job is requeued", timeout_s)

    def wait_for_end(self, timeout_s: float) -> float:
        """Seconds until no component holds a node any more."""
        return wait_until(lambda: self.number not in self.cluster.queue(), f"job {self.number} has ended", timeout_s)

    def steps(self) -> dict[str, str]:
        """Slurm's ids of the running steps, critic and actor, by name."""
        lines = self.cluster.run("squeue", "--steps", "--noheader", "--format=%j %i").splitlines()
        return dict(line.split() for line in lines)

    def report(self) -> str:
        """All logs."""
        logs = [self.log, *sorted(self.output_dir.glob("*.log"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs if log.exists())


def submit(cluster: Cluster, overrides: Overrides, output_dir: Path, *options: str, **settings: str) -> Job:
    """`sbatch slurm/ppo_hetjob.sh` from the repository's root, ``settings`` and the overrides in its environment."""
    environment = settings | {
        "OUTPUT_DIR": str(output_dir),
        "CRITIC_ARGS": " ".join(overrides.critic),
        "ACTOR_ARGS": " ".join(overrides.actor),
    }
    done = subprocess.run(
        ["sbatch", "--parsable", f"--output={output_dir.with_suffix('.log')}", *options, "slurm/ppo_hetjob.sh"],
        cwd=ROOT,
        env=cluster.environment | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return Job(cluster, output_dir, int(done.stdout))

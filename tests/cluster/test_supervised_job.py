"""`sbatch slurm/supervised.sh` on a real Slurm: two nodes train one model, and a requeued job goes on exactly."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import ENDED, Cluster, wait_until
from tests.support.models import save_policy

pytestmark = pytest.mark.more

RUN_S = 300.0
STEPS = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    save_policy(folder / "base")
    rows = [{"prompt": f"w{i} w{i + 1}", "response": f" w{i + 2} w{i + 3}"} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.path={folder / 'base'}", f"data.train_path={folder / 'rows.jsonl'}", "model.dtype=float32",
        "run.num_threads=1", "engine.optim.lr=1e-3", f"trainer.max_steps={STEPS}", "trainer.batch_size=8",
        "trainer.micro_batch_size=4", "checkpoint.save_interval=5",
    ]  # fmt: skip


def submit(cluster: Cluster, output_dir: Path, overrides: list[str]) -> int:
    """SFT on two nodes; the job's number."""
    job = [f"--output={output_dir}.log", "--nodes=2", "slurm/supervised.sh", "trainers/train_sft.py"]
    return int(cluster.run("sbatch", "--parsable", *job, f"run.output_dir={output_dir}", *overrides))


def state(cluster: Cluster, number: int, output_dir: Path) -> str:
    state = cluster.job(number)["JobState"]
    assert state not in ENDED - {"COMPLETED"}, Path(f"{output_dir}.log").read_text()
    return state


def test_two_nodes_train_one_model_and_a_requeued_job_ends_with_the_same_weights(cluster, overrides, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    number = submit(cluster, whole, overrides)
    wait_until(lambda: state(cluster, number, whole) == "COMPLETED", "the whole run is done", RUN_S)
    assert cluster.job(number)["NumNodes"] == "2"

    number = submit(cluster, cut, overrides)
    wait_until(lambda: any((cut / "checkpoints").glob("*.ckpt")), "the first checkpoint", RUN_S)
    cluster.run("scancel", "--batch", "--signal=USR1", str(number))
    wait_until(lambda: state(cluster, number, cut) == "PENDING", "the job is requeued", RUN_S)
    assert not (cut / "export").exists()
    cluster.start_soon(number)
    wait_until(lambda: state(cluster, number, cut) == "COMPLETED", "the resumed run is done", RUN_S)
    log = Path(f"{cut}.log").read_text()
    assert "resuming from" in log and "requeued" in log
    assert (cut / "export/model.safetensors").read_bytes() == (whole / "export/model.safetensors").read_bytes()

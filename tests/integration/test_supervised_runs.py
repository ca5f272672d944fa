"""Supervised runs that are killed, split over ranks or packed end with the weights of one that is not."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nemo_style_rlhf.launch.preemption import PREEMPTED_EXIT
from tests.support import warm
from tests.support.attacks import Attack
from tests.support.metrics import metrics, without_timers
from tests.support.models import WORDS, save_policy, save_reward_model

STEPS = 24
CONSTANT = ["engine.scheduler.name=constant", "engine.scheduler.warmup_steps=0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A policy with dropout, a reward model, texts and pairs of unequal lengths."""
    folder = tmp_path_factory.mktemp("supervised_runs")
    save_policy(folder / "policy", attention_dropout=0.2)
    save_reward_model(folder / "reward")
    generator = torch.Generator().manual_seed(3)

    def words(most: int) -> str:
        count = int(torch.randint(1, most, (1,), generator=generator))
        return " ".join(WORDS[2 + int(torch.randint(60, (1,), generator=generator))] for _ in range(count))

    texts = [{"prompt": words(8), "response": words(40)} for _ in range(60)]
    pairs = [
        {"prompt": words(8), "chosen": words(30), "rejected": words(30), "source": "ab"[row % 2]} for row in range(40)
    ]
    for name, rows in (("texts", texts), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(folder: Path, script: str, run: str, *overrides: str) -> list[str]:
    start = "reward" if script == "train_reward_model" else "policy"
    rows = "texts" if script == "train_sft" else "pairs"
    return [
        f"trainers/{script}.py", "run.num_threads=1", f"run.output_dir={folder / run}",
        f"model.path={folder / start}", "model.dtype=float32", f"data.train_path={folder / rows}.jsonl",
        f"data.val_path={folder / rows}.jsonl", "engine.optim.lr=1e-3", "engine.optim.eps=1e-5", "trainer.batch_size=8",
        f"trainer.max_steps={STEPS}", "trainer.log_interval=1", "trainer.val_interval=8", "tracking.progress=false",
        *overrides,
    ]  # fmt: skip


def train(folder: Path, script: str, run: str, *overrides: str, ranks: int = 1) -> dict[str, torch.Tensor]:
    """The exported weights."""
    process = warm.run(command(folder, script, run, *overrides), ranks=ranks, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    return load_file(folder / run / "export" / "model.safetensors")


def logged(folder: Path) -> list[dict[str, float]]:
    return without_timers(metrics(folder))


def assert_near(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=tolerance, rtol=0, msg=name)


def test_a_killed_run_resumes_to_the_last_bit(folder: Path) -> None:
    """Dropout, a learning-rate schedule and accumulation are on; the kill comes between two checkpoints."""
    settings = ["model.disable_dropout=false", "trainer.micro_batch_size=4", "checkpoint.save_interval=5"]
    whole = train(folder, "train_sft", "whole", *settings)
    log = folder / "killed.log"
    process = warm.Forked(command(folder, "train_sft", "killed", *settings), log, log)
    deadline = time.monotonic() + 120
    reached = folder / "killed" / "metrics.jsonl"
    while not (reached.exists() and '"step": 12' in reached.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.wait()
    kept = [path.name for path in (folder / "killed" / "checkpoints").glob("*.ckpt")]
    assert len(kept) == 1 and kept[0] >= "step_00000010.ckpt"
    assert not (folder / "killed" / "export").exists()
    resumed = train(folder, "train_sft", "killed", *settings, "run.resume=must")
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name
    assert logged(folder / "killed") == logged(folder / "whole")


def ended_by(folder: Path, run: str, number: int, *settings: str, step: int = 3) -> int:
    """The exit code of a run that gets a signal once it has logged ``step``."""
    log = folder / f"{run}.log"
    process = warm.Forked(command(folder, "train_sft", run, *settings), log, log)
    deadline = time.monotonic() + 120
    reached = folder / run / "metrics.jsonl"
    while not (reached.exists() and f'"step": {step}' in reached.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.002)
    process.send_signal(number)
    return process.wait(120)


LONG = ["trainer.micro_batch_size=4", "trainer.max_steps=200", "trainer.val_interval=0", *CONSTANT]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_run_that_is_told_to_end_saves_its_step_and_goes_on(folder: Path, number: signal.Signals) -> None:
    run = f"told_{number.name}"
    assert ended_by(folder, run, number, *LONG) == PREEMPTED_EXIT
    log = (folder / f"{run}.log").read_text()
    (step,) = re.findall(r"step (\d+) is saved, the stage ends as it was told; the same command goes on", log)
    (saved,) = (folder / run / "checkpoints").glob("*.ckpt")
    assert saved.name == f"step_{int(step):08d}.ckpt" and int(step) >= 4 and "Traceback" not in log
    last = f"trainer.max_steps={int(step) + 3}"
    resumed = train(folder, "train_sft", run, *LONG, last, "run.resume=must")
    whole = train(folder, "train_sft", f"whole_{number.name}", *LONG, last)
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
    assert logged(folder / run) == logged(folder / f"whole_{number.name}")


def test_the_last_step_is_saved_whatever_the_interval_and_the_run_can_be_made_longer(folder: Path) -> None:
    """Also one with a budget of tokens, whose later steps may be fuller."""
    settings = ["trainer.micro_batch_tokens=60", "trainer.val_interval=0", *CONSTANT]
    train(folder, "train_sft", "short", *settings, "trainer.max_steps=3")
    (saved,) = (folder / "short" / "checkpoints").glob("*.ckpt")
    assert saved.name == "step_00000003.ckpt"
    longer = train(folder, "train_sft", "short", *settings, "trainer.max_steps=9", "run.resume=must")
    assert [row["step"] for row in metrics(folder / "short")][-1] == 8
    assert_near(longer, train(folder, "train_sft", "planned_tokens", *settings, "trainer.max_steps=9"), 1e-5)


def test_results_without_a_checkpoint_are_moved_aside_or_the_start_is_refused(folder: Path) -> None:
    settings = [*LONG, "checkpoint.save_interval=0"]
    assert ended_by(folder, "unsaved", signal.SIGKILL, *settings) == -signal.SIGKILL
    before = (folder / "unsaved" / "metrics.jsonl").read_bytes()
    refused = warm.run(command(folder, "train_sft", "unsaved", *settings, "engine.optim.lr=2e-3"), timeout=120)
    assert refused.returncode == 2
    assert re.search(
        r"unsaved holds results of \d+ steps but no checkpoint .* \(engine\.optim\.lr: 0\.001 -> 0\.002\): choose another",
        refused.stderr,
    )
    assert (folder / "unsaved" / "metrics.jsonl").read_bytes() == before
    again = warm.Forked(
        command(folder, "train_sft", "unsaved", *settings), folder / "unsaved.log", folder / "unsaved.log"
    )
    aside = folder / "unsaved" / "earlier_001" / "metrics.jsonl"
    while not (aside.exists() and (folder / "unsaved" / "metrics.jsonl").exists()):
        assert again.poll() is None
        time.sleep(0.01)
    again.kill()
    again.wait()
    assert (folder / "unsaved" / "earlier_001" / "metrics.jsonl").read_bytes() == before
    assert "they are now in" in (folder / "unsaved.log").read_text()


def test_a_start_that_would_train_nothing_changes_no_file(folder: Path) -> None:
    settings = ["trainer.max_steps=3", "trainer.val_interval=0", *CONSTANT]
    train(folder, "train_sft", "ended", *settings)
    before = {path: path.stat().st_mtime_ns for path in (folder / "ended").rglob("*") if path.is_file()}
    again = warm.run(command(folder, "train_sft", "ended", *settings, "engine.optim.lr=2e-3"), timeout=120)
    assert again.returncode == 2
    assert re.search(
        r"has ended after step 3 and exported .*; this start changes engine\.optim\.lr: 0\.001 -> 0\.002, but leaves no step to "
        r"train: raise trainer\.max_steps",
        again.stderr,
    )
    assert {path: path.stat().st_mtime_ns for path in (folder / "ended").rglob("*") if path.is_file()} == before


def test_adapters_resume_to_the_last_bit_and_merge(folder: Path) -> None:
    """DPO, whose reference is the adapter switched off; gradient checkpointing and packing are on."""
    settings = [
        "model.lora.rank=4", "model.packing=true", "model.gradient_checkpointing=true", "checkpoint.save_interval=10",
        "trainer.micro_batch_size=4", "checkpoint.keep_last=3",
    ]  # fmt: skip
    whole = train(folder, "train_dpo", "adapters", *settings)
    saved = sorted((folder / "adapters" / "checkpoints").glob("*.ckpt"))
    assert [path.name for path in saved] == ["step_00000010.ckpt", "step_00000020.ckpt", "step_00000024.ckpt"]
    weights = torch.load(saved[0], weights_only=True)["state_dict"]
    assert weights and all("lora_" in name for name in weights)
    for later in saved[1:]:
        later.unlink()  # as if it had been killed before
    resumed = train(folder, "train_dpo", "adapters", *settings, "run.resume=must")
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name
    start = load_file(folder / "policy" / "model.safetensors")
    assert any(not torch.equal(weight, start[name]) for name, weight in whole.items())  # it did learn
    merge = ["trainers/merge_lora.py", str(folder / "adapters" / "export_adapter"), str(folder / "merged")]
    assert warm.run(merge, timeout=60).returncode == 0
    merged = load_file(folder / "merged" / "model.safetensors")
    assert_near(resumed, merged, 1e-6)
    assert (folder / "merged" / "prompt_template.json").is_file()


@pytest.mark.parametrize("strategy", ["auto", "zero1", "zero3"])
def test_a_pickle_in_a_checkpoint_is_not_run(folder: Path, tmp_path: Path, strategy: str) -> None:
    """Put in the place of any of its files, one after another."""
    run = f"attacked_{strategy}"
    settings = [f"trainer.strategy={strategy}", "checkpoint.save_interval=2"]
    train(folder, "train_sft", run, *settings, "trainer.max_steps=2")
    (saved,) = (folder / run / "checkpoints").glob("*.ckpt")
    files = [path for path in saved.rglob("*.pt")] if saved.is_dir() else [saved]
    assert len(files) == (1 if strategy == "auto" else 3)
    for path in files:
        content = path.read_bytes()
        torch.save({"module": Attack(tmp_path / "marker")}, path)
        refused = warm.run(command(folder, "train_sft", run, *settings, "trainer.max_steps=4"), timeout=300)
        assert refused.returncode == 2, refused.stderr[-3000:]
        assert "Traceback" not in refused.stderr and not (tmp_path / "marker").exists()
        (line,) = (line for line in refused.stderr.splitlines() if line.startswith("error: "))
        assert f"{path} is damaged, or holds something else than tensors" in line
        path.write_bytes(content)
    train(folder, "train_sft", run, *settings, "trainer.max_steps=4")


def test_another_run_is_not_resumed(folder: Path) -> None:
    """Other rows are, and another model where the first was, before a model is loaded."""
    train(folder, "train_sft", "first", "checkpoint.save_interval=10")
    rows = (folder / "texts.jsonl").read_text().splitlines(keepends=True)
    (folder / "reversed.jsonl").write_text("".join(reversed(rows)))
    save_policy(folder / "other", seed=5, attention_dropout=0.2)
    (folder / "other" / "model.safetensors").write_bytes(b"broken" * 10000)
    for override, said in (
        ("trainer.batch_size=4", "is of a run with trainer.batch_size 8, this one has 4"),
        ("model.lora.rank=2", "is of a run with model.lora"),
        (f"data.train_path={folder / 'reversed.jsonl'}", "is of a run with training data 60 rows, sha256"),
        (f"model.path={folder / 'other'}", "is of a run with the model in model.path sha256"),
        ("run.seed=2", "is of a run with run.seed 1234, this one has 2"),
        ("run.resume=never", "holds checkpoints but run.resume=never"),
    ):
        process = warm.run(command(folder, "train_sft", "first", "checkpoint.save_interval=10", override), timeout=60)
        assert process.returncode == 2 and said in process.stderr and "Traceback" not in process.stderr


@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("zero1", 2)])
def test_a_resumed_run_follows_what_was_changed_and_keeps_both_configurations(
    folder: Path, strategy: str, ranks: int
) -> None:
    """Learning rate and length; data and model in other folders. The checkpoint is of the first run's last step."""
    run, fixed = f"changed_{strategy}", [
        *CONSTANT, f"trainer.strategy={strategy}", "trainer.micro_batch_size=4", "checkpoint.save_interval=8",
    ]  # fmt: skip
    train(folder, "train_sft", run, *fixed, ranks=ranks)
    elsewhere = folder / f"elsewhere_{strategy}"
    shutil.copytree(folder / "policy", elsewhere)
    shutil.copy(folder / "texts.jsonl", elsewhere / "rows.jsonl")
    changed = [
        f"model.path={elsewhere}", f"data.train_path={elsewhere / 'rows.jsonl'}", f"trainer.max_steps={STEPS + 8}",
        "engine.optim.lr=2e-3", "engine.optim.weight_decay=0.5",
    ]  # fmt: skip
    done = warm.run(command(folder, "train_sft", run, *fixed, *changed), ranks=ranks, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for line in (f"trainer.max_steps: {STEPS} -> {STEPS + 8}", "engine.optim.lr: 0.001 -> 0.002", "model.path: "):
        assert done.stderr.count(line) == 1, done.stderr
    rates = {line["step"]: line["train/lr"] for line in logged(folder / run) if "train/lr" in line}
    assert rates == pytest.approx({step: 1e-3 if step < STEPS else 2e-3 for step in range(STEPS + 8)})
    kept = sorted((folder / run / "configs").iterdir())
    assert [path.name for path in kept] == ["001_step_00000000.yaml", f"002_step_{STEPS:08d}.yaml"]
    assert "lr: 0.001" in kept[0].read_text() and "lr: 0.002" in kept[1].read_text()
    assert (folder / run / "config.yaml").read_bytes() == kept[1].read_bytes()


def test_a_longer_run_ends_with_the_weights_of_one_that_was_planned_so(folder: Path) -> None:
    settings = [
        *CONSTANT, "model.disable_dropout=false", "trainer.micro_batch_size=4", "checkpoint.save_interval=8"
    ]  # fmt: skip
    whole = train(folder, "train_sft", "planned", *settings)
    train(folder, "train_sft", "made_longer", *settings, f"trainer.max_steps={STEPS - 8}")
    longer = train(folder, "train_sft", "made_longer", *settings)
    for name, weight in whole.items():
        assert torch.equal(weight, longer[name]), name


def test_a_run_that_has_ended_says_so_and_touches_nothing(folder: Path) -> None:
    """Unless its export is damaged."""
    train(folder, "train_sft", "ended")
    weights = folder / "ended" / "export" / "model.safetensors"
    before = weights.stat()
    done = warm.run(command(folder, "train_sft", "ended"), timeout=60)
    assert done.returncode == 0 and "to train on raise trainer.max_steps" in done.stdout
    assert "rows kept" not in done.stderr and weights.stat() == before
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    done = warm.run(command(folder, "train_sft", "ended"), timeout=300)
    assert done.returncode == 0 and "exported to" in done.stderr and weights.read_bytes() == content


@pytest.mark.parametrize("script", ["train_sft", "train_reward_model", "train_kto"])
def test_packed_token_budgets_and_ranks_end_with_the_same_weights(folder: Path, script: str) -> None:
    whole = train(folder, script, f"{script}_one")
    packed = train(folder, script, f"{script}_packed", "model.packing=true", "trainer.micro_batch_tokens=100")
    ranks = train(folder, script, f"{script}_ranks", "trainer.micro_batch_size=2", ranks=2)
    assert_near(whole, packed, 1e-5)
    assert_near(whole, ranks, 1e-5)
    steps = [logged(folder / f"{script}_{run}") for run in ("one", "packed", "ranks")]
    for line, *others in zip(*steps, strict=True):
        for other in others:
            assert line.keys() == other.keys()
            assert all(abs(line[name] - other[name]) < 1e-4 * max(1, abs(line[name])) for name in line), (line, other)


@pytest.mark.more
@pytest.mark.parametrize(
    ("strategy", "script"),
    [("zero1", "train_sft"), ("zero2", "train_reward_model"), ("zero3", "train_kto")],
)
def test_shares_over_ranks_do_not_change_the_result(folder: Path, strategy: str, script: str) -> None:
    """Weights, and all metrics but the timers: losses, the gradient's norm, the validations.

    These are of five batches of rows, for two ranks, and after steps 7, 14, 21 and the last.
    """
    settings = [
        "trainer.micro_batch_size=2", "engine.gradient_clip_val=0.5", "trainer.val_batch_size=13", "trainer.val_interval=7"
    ]  # fmt: skip
    whole = train(folder, script, f"{script}_clipped", *settings)
    shared = train(folder, script, f"{script}_{strategy}", f"trainer.strategy={strategy}", *settings, ranks=2)
    assert_near(whole, shared, 1e-5)
    lines = zip(logged(folder / f"{script}_clipped"), logged(folder / f"{script}_{strategy}"), strict=True)
    for line, other in lines:
        assert line == pytest.approx(other, rel=1e-4, abs=1e-4)
    if script == "train_reward_model":
        evaluations = [
            json.loads((folder / f"{script}_{run}" / "pair_evaluation.json").read_text())
            for run in ("clipped", strategy)
        ]
        assert evaluations[0]["all"]["accuracy"] == evaluations[1]["all"]["accuracy"]


@pytest.mark.more
def test_shares_over_ranks_resume_to_the_last_bit(folder: Path) -> None:
    """DPO's reference, the policy without its adapters, is sharded, too."""
    run = "dpo_shares"
    settings = [
        "trainer.strategy=zero3", "model.lora.rank=4", "trainer.micro_batch_size=2", "checkpoint.save_interval=10",
        "checkpoint.keep_last=3",
    ]  # fmt: skip
    whole = train(folder, "train_dpo", run, *settings, ranks=2)
    saved = sorted((folder / run / "checkpoints").glob("*.ckpt"))
    assert [path.name for path in saved] == ["step_00000010.ckpt", "step_00000020.ckpt", "step_00000024.ckpt"]
    shutil.rmtree(saved[1])
    shutil.rmtree(folder / run / "export")
    lines = logged(folder / run)
    resumed = train(folder, "train_dpo", run, *settings, "run.resume=must", ranks=2)
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name
    assert logged(folder / run) == lines
    refused = command(folder, "train_dpo", run, *settings, "run.resume=must", "trainer.strategy=auto")
    done = warm.run(refused, timeout=60)
    assert done.returncode == 2 and "resume it as it was" in done.stderr


def test_the_reward_model_knows_its_own_statistics_and_quality(folder: Path) -> None:
    train(folder, "train_reward_model", "statistics", "statistics_pairs=40", "data.subset_key=source")
    export = folder / "statistics" / "export"
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]

    def reward(prompt: str, response: str) -> float:
        ids = tokenizer(f"{prompt} {response}<eos>", return_tensors="pt").input_ids
        with torch.no_grad():
            return float(model(ids).logits)

    scores = torch.tensor([[reward(row["prompt"], row[side]) for row in rows] for side in ("chosen", "rejected")])
    config = json.loads((export / "config.json").read_text())
    assert config["reward_mean"] == pytest.approx(float(scores.mean()), abs=1e-5)
    assert config["reward_std"] == pytest.approx(float(scores.std(correction=0)), abs=1e-5)
    evaluation = json.loads((folder / "statistics" / "pair_evaluation.json").read_text())
    margins = scores[0] - scores[1]
    assert evaluation["all"]["pairs"] == 40 and set(evaluation["subsets"]) == {"a", "b"}
    assert evaluation["all"]["accuracy"] == pytest.approx(float((margins > 0).float().mean()))
    assert evaluation["subsets"]["b"]["margin"] == pytest.approx(float(margins[1::2].mean()), abs=1e-5)

"""DPO and KTO as users start them: on made-up preferences, which they must learn, and on Anthropic-HH rows where they are."""

import gzip
import json
import math
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_style_rlhf.data.hh import split_last_answer
from nemo_style_rlhf.data.template_files import write_template
from tests.support.metrics import metrics
from tests.support.models import save_policy
from tests.support.operators import refused
from tests.support.paths import ROOT
from tests.support.supervised_runs import train

DATA = ROOT.parent / "shared" / "data"
HH, STORIES = DATA / "hh_rlhf", DATA / "stories260K"
needs_hh = pytest.mark.skipif(
    not (HH.is_dir() and STORIES.is_dir()), reason=f"the HH-RLHF rows or the stories260K model are not in {DATA}"
)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Path:
    """A random policy with dropout in its config, and rows in which counting on is better than saying w50."""
    folder = tmp_path_factory.mktemp("preferences")
    save_policy(folder / "policy", attention_dropout=0.1)
    write_template(folder / "policy", None, AutoTokenizer.from_pretrained(folder / "policy"), append_eos=True)
    numbers = range(1, 33)
    pairs = [{"prompt": f"w{i}", "chosen": f" w{i + 1} w{i + 2}", "rejected": " w50"} for i in numbers]
    judged = [{"prompt": f"w{i}", "completion": f" w{i + 1}", "label": True} for i in numbers]
    judged += [{"prompt": f"w{i}", "completion": " w50 w51", "label": False} for i in numbers]
    write(folder / "pairs.jsonl", [*pairs, {"prompt": "w1", "chosen": " w2", "rejected": " w2"}])
    write(folder / "judged.jsonl", [*judged, {"prompt": "w1", "completion": " ", "label": False}])
    return folder


def overrides(workshop: Path, run: str, rows: str) -> list[str]:
    return [
        f"run.output_dir={workshop / run}", f"model.path={workshop / 'policy'}", "model.dtype=float32",
        f"data.train_path={workshop / rows}", f"data.val_path={workshop / rows}", "engine.optim.lr=1e-3",
        "trainer.batch_size=8", "trainer.micro_batch_size=4", "trainer.max_steps=30", "trainer.val_interval=10",
        "trainer.log_interval=1",
    ]  # fmt: skip


LEARNED = {
    "dpo": ("train_dpo", "pairs.jsonl", ["nll_weight=0.1"]),
    "cdpo": ("train_dpo", "pairs.jsonl", ["label_smoothing=0.1", "model.gradient_checkpointing=true"]),
    "ipo": ("train_dpo", "pairs.jsonl", ["loss=ipo", "beta=0.5"]),
    "kto": ("train_kto", "judged.jsonl", ["model.disable_dropout=false", "undesirable_weight=1.33"]),
    "kto on pairs": ("train_kto", "pairs.jsonl", ["model.gradient_checkpointing=true"]),
}


@pytest.mark.parametrize("name", LEARNED)
def test_preferences_are_learned(workshop, name):
    script, rows, settings = LEARNED[name]
    run = name.replace(" ", "_")
    recorded = workshop / f"{run}.json" if name in ("dpo", "kto") else None
    done = train(script, *overrides(workshop, run, rows), *settings, operators_in=recorded)
    assert done.returncode == 0, done.stderr
    assert recorded is None or not refused(recorded)
    assert "1 dropped (1 with " in done.stderr
    lines = metrics(workshop / run)
    losses = [line["val/loss"] for line in lines if "val/loss" in line]
    assert losses[-1] < losses[0]
    first = next(line for line in lines if "train/loss" in line)
    if script == "train_dpo":
        assert first["train/rewards/margins"] == pytest.approx(0, abs=1e-4)  # policy and reference still agree
        assert lines[-1]["val/rewards/accuracies"] == 1.0
        assert lines[-1]["val/rewards/chosen"] > lines[-1]["val/rewards/rejected"]
    else:
        assert first["train/kl"] == pytest.approx(0, abs=1e-4)
        assert lines[-1]["val/rewards/desirable"] > lines[-1]["val/rewards/undesirable"]
    export = workshop / run / "export"
    AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)


def test_a_dry_run_leaves_no_model(workshop):
    for script, rows in (("train_dpo", "pairs.jsonl"), ("train_kto", "judged.jsonl")):
        done = train(script, *overrides(workshop, f"dry_{script}", rows), "--dry-run")
        assert done.returncode == 0, done.stderr
        assert not (workshop / f"dry_{script}" / "export").exists()


MISTAKES = {
    "missing file": (
        "train_dpo",
        "data.train_path=/nowhere/rows.jsonl",
        "data.train_path=/nowhere/rows.jsonl: it does not exist",
    ),
    "judged rows for DPO": ("train_dpo", "data.train_path={workshop}/judged.jsonl", "has no key 'chosen'"),
    "a margin for DPO": ("train_dpo", "data.margin_key=by", "margin_key"),
    "unknown loss": ("train_dpo", "loss=hinge", "loss=hinge is not possible: expected one of sigmoid, ipo"),
    "smoothed ipo": ("train_dpo", ["loss=ipo", "label_smoothing=0.1"], "label_smoothing=0.1 is not possible"),
    "as much noise as signal": ("train_dpo", "label_smoothing=0.5", "a share from 0 to below 0.5"),
    "no pull": ("train_dpo", "beta=0", "beta=0.0 is not possible: expected a number above 0"),
    "random start": (
        "train_dpo",
        "model.init=random",
        "model.init=random is not possible: expected pretrained, for DPO",
    ),
    "no label": ("train_kto", "data.label_key=good", "has no key 'good'"),
    "wrong label": ("train_kto", "data.label_key=prompt", "holds 'w1', expected true or false, or 1 or 0"),
    "lone row": ("train_kto", ["trainer.batch_size=1", "trainer.micro_batch_size=1"], "trainer.batch_size=1 is not"),
    "other template": ("train_dpo", "data.prompt_template='Q: {{prompt}}'", "was trained with None"),
    "all too long": ("train_kto", "data.max_length=2", "raise data.max_length"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_get_one_sentence_and_a_failing_exit(workshop, name):
    script, settings, sentence = MISTAKES[name]
    settings = [settings] if isinstance(settings, str) else settings
    rows = "pairs.jsonl" if script == "train_dpo" else "judged.jsonl"
    settings = [setting.format(workshop=workshop) for setting in settings]
    done = train(script, *overrides(workshop, "refused", rows), *settings)
    assert done.returncode == 2
    assert sentence in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


# --- Anthropic-HH -----------------------------------------------------------------------------------------------------


def transcripts(split: str, count: int) -> list[dict[str, str]]:
    with gzip.open(HH / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(next(lines)) for _ in range(count)]


def write_transcripts(folder: Path, train: int = 1300, test: int = 500) -> None:
    write(folder / "train.jsonl", transcripts("train", train))
    write(folder / "test.jsonl", transcripts("test", test))


def hh_overrides(folder: Path) -> list[str]:
    return [
        f"run.output_dir={folder / 'run'}", f"model.path={STORIES}", "model.dtype=float32", "data.max_length=160",
        f"data.train_path={folder / 'train.jsonl'}", f"data.val_path={folder / 'test.jsonl'}",
        "engine.optim.lr=1e-3", "trainer.batch_size=16", "trainer.micro_batch_size=8", "trainer.max_steps=16",
        "trainer.val_interval=8", "trainer.log_interval=1",
    ]  # fmt: skip


@pytest.mark.more
@needs_hh
def test_sft_on_hh_transcripts(tmp_path):
    write_transcripts(tmp_path, test=150)
    done = train("train_sft", *hh_overrides(tmp_path), "data.format=text", "data.text_key=chosen")
    assert done.returncode == 0, done.stderr
    assert "longer than 160 tokens" in done.stderr
    losses = [line["val/loss"] for line in metrics(tmp_path / "run") if "val/loss" in line]
    assert losses[-1] < losses[0]


ALL_TRANSCRIPTS = [
    "data.max_length=320", "trainer.batch_size=64", "trainer.micro_batch_size=16", "engine.optim.weight_decay=0.1",
    "model.packing=true",
]  # fmt: skip
"""What the annotators preferred is hard to tell for a 0.3 M model that knows children's stories: it takes long conversations
and a low learning rate that a few steps lower the loss on pairs it has not seen, by a thousandth of a nat or two."""


@pytest.mark.soak
@needs_hh
def test_reward_model_on_hh_transcripts(tmp_path):
    write_transcripts(tmp_path, train=4166)
    settings = [*ALL_TRANSCRIPTS, "engine.optim.lr=3e-4", "trainer.max_steps=10", "trainer.val_interval=5"]
    done = train("train_reward_model", *hh_overrides(tmp_path), *settings, "statistics_pairs=64")
    assert done.returncode == 0, done.stderr
    assert "3 with differing prompts, 2 with an empty response" in done.stderr
    losses = [line["val/loss"] for line in metrics(tmp_path / "run") if "val/loss" in line]
    assert losses[-1] < min(losses[0], math.log(2))  # a fresh head begins above ln 2


@needs_hh
def test_a_reward_model_learns_hh_pairs_by_heart(tmp_path):
    write_transcripts(tmp_path, test=20)
    done = train("train_reward_model", *hh_overrides(tmp_path), "trainer.max_steps=48", "trainer.val_interval=48")
    assert done.returncode == 0, done.stderr
    losses = [line["train/loss"] for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8]), losses


@needs_hh
def test_dpo_with_the_likelihood_of_chosen_responses_learns_their_language(tmp_path):
    write_transcripts(tmp_path)
    done = train("train_dpo", *hh_overrides(tmp_path), "nll_weight=1", "beta=0.01")
    assert done.returncode == 0, done.stderr
    assert "longer than 160 tokens" in done.stderr
    lines = metrics(tmp_path / "run")
    first, last = lines[0], lines[-1]
    assert first["train/loss"] == pytest.approx(math.log(2) + first["train/nll"], abs=1e-4)
    losses = [line["val/loss"] for line in lines if "val/loss" in line]
    assert losses[-1] < losses[0] < math.log(2) + first["train/nll"]
    assert all(math.isfinite(value) for value in last.values())


@pytest.mark.soak
@needs_hh
def test_dpo_on_hh_transcripts(tmp_path):
    write_transcripts(tmp_path, train=4166)
    settings = [*ALL_TRANSCRIPTS, "engine.optim.lr=1e-4", "beta=0.05", "trainer.max_steps=6", "trainer.val_interval=3"]
    done = train("train_dpo", *hh_overrides(tmp_path), *settings)
    assert done.returncode == 0, done.stderr
    assert (
        "3 with differing prompts, 2 with an empty response" in done.stderr and "longer than 320 tokens" in done.stderr
    )
    lines = metrics(tmp_path / "run")
    assert lines[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-4)
    losses = [line["val/loss"] for line in lines if "val/loss" in line]
    assert losses[-1] < losses[0] < math.log(2)
    assert all(math.isfinite(value) for value in lines[-1].values())


@pytest.mark.more
@needs_hh
def test_kto_on_hh_answers(tmp_path):
    """Real answers, judged by whether they ask something: that much a 0.3 M model can learn in 16 steps."""
    for split, count in (("train", 1300), ("test", 500)):
        rows = []
        for row in transcripts(split, count):
            for transcript in row.values():
                prompt, answer = split_last_answer(transcript)
                if len(transcript) < 300:
                    rows.append({"prompt": prompt, "completion": answer, "label": "?" in answer})
        write(
            tmp_path / f"{split}.jsonl",
            [*rows, {"prompt": "\n\nHuman: ?\n\nAssistant:", "completion": "", "label": True}],
        )
    done = train("train_kto", *hh_overrides(tmp_path), "desirable_weight=2")
    assert done.returncode == 0, done.stderr
    assert "with an empty response" in done.stderr and "longer than 160 tokens" in done.stderr
    lines = metrics(tmp_path / "run")
    losses = [line["val/loss"] for line in lines if "val/loss" in line]
    assert lines[0]["train/kl"] == pytest.approx(0, abs=1e-4)
    assert losses[-1] < losses[0] < lines[0]["train/loss"]
    assert lines[-1]["val/rewards/desirable"] > lines[-1]["val/rewards/undesirable"]

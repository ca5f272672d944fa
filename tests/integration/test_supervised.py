"""Both supervised trainers as users start them, on a tiny data set; transformers loads what they export."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from tests.support.metrics import metrics
from tests.support.models import letter_tokenizer
from tests.support.operators import refused
from tests.support.supervised_runs import train

TEMPLATE = "q{prompt}"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A tokenizer with a chat template, a config with dropout, rows in which "ab" is answered "cd" and better than "dc"."""
    folder = tmp_path_factory.mktemp("supervised")
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder / "base")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=1, attention_dropout=0.1,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder / "base")
    sft = [{"prompt": "ab", "response": "cd"} for _ in range(32)]
    pairs = [{"prompt": "ab", "chosen": "cd", "rejected": "dc"} for _ in range(32)]
    for name, rows in (("sft", sft), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def sft_overrides(workshop: Path, run: str) -> list[str]:
    return [
        f"run.output_dir={workshop / run}",
        f"model.path={workshop / 'base'}",
        "model.init=random",
        f"data.train_path={workshop / 'sft.jsonl'}",
        f"data.val_path={workshop / 'sft.jsonl'}",
        "engine.optim.lr=1e-2",
        "trainer.batch_size=8",
        "trainer.micro_batch_size=4",
        "trainer.max_steps=40",
        "trainer.log_interval=5",
        "trainer.val_interval=10",
    ]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def sft_export(workshop, request):
    run = f"sft_{request.param}"
    overrides = [f"model.dtype={request.param}", f"data.prompt_template='{TEMPLATE}'", "tracking.tensorboard=true"]
    done = train("train_sft", *sft_overrides(workshop, run), *overrides, operators_in=workshop / f"{run}.json")
    assert done.returncode == 0, done.stderr
    assert not refused(workshop / f"{run}.json")
    return workshop / run / "export", request.param


def test_sft_learns_and_exports_a_plain_directory(workshop, sft_export):
    export, dtype = sft_export
    losses = [line["val/loss"] for line in metrics(export.parent) if "val/loss" in line]
    assert len(losses) == 4 and losses[-1] < 0.2 < losses[0]
    assert any("train/grad_norm" in line and "train/lr" in line for line in metrics(export.parent))
    assert list((export.parent / "tensorboard").glob("events.*"))

    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    assert model.dtype == getattr(torch, dtype)
    assert model.config.attention_dropout == 0.1
    original = AutoTokenizer.from_pretrained(workshop / "base")
    assert tokenizer.get_vocab() == original.get_vocab() and tokenizer.pad_token == original.pad_token
    assert tokenizer.chat_template == original.chat_template
    assert json.loads((export / "prompt_template.json").read_text())["template"] == TEMPLATE
    prompt = tokenizer("qab", return_tensors="pt")["input_ids"]
    answer = model.generate(prompt, do_sample=False, max_new_tokens=5)[0, prompt.shape[1] :]
    assert tokenizer.convert_ids_to_tokens(answer.tolist()) == ["c", "d", "</s>"]


def test_the_reward_model_prefers_the_chosen_response(workshop, sft_export):
    export, dtype = sft_export
    run = workshop / f"rm_{dtype}"
    done = train(
        "train_reward_model", f"run.output_dir={run}", f"model.path={export}", f"model.dtype={dtype}",
        f"data.train_path={workshop / 'pairs.jsonl'}", f"data.val_path={workshop / 'pairs.jsonl'}",
        "engine.optim.lr=3e-3", "trainer.batch_size=8", "trainer.max_steps=20", "data.on_template_mismatch=warn",
        operators_in=run.with_suffix(".json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not refused(run.with_suffix(".json"))
    assert metrics(run)[-1]["val/pair_accuracy"] == 1.0
    model = AutoModelForSequenceClassification.from_pretrained(run / "export")
    assert model.config.num_labels == 1 and model.config.pad_token_id is not None
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    chosen, rejected = (
        model(input_ids=torch.tensor([[*tokenizer(f"ab{response}")["input_ids"], 1]])).logits.item()
        for response in ("cd", "dc")
    )
    assert chosen > rejected


def test_one_seed_gives_the_same_bits(workshop):
    digests = []
    for run in ("first", "second"):
        overrides = [
            *sft_overrides(workshop, run),
            "model.dtype=float32",
            "trainer.max_steps=6",
            "model.disable_dropout=false",
        ]
        done = train("train_sft", *overrides)
        assert done.returncode == 0, done.stderr
        digests.append((workshop / run / "export" / "model.safetensors").read_bytes())
    assert digests[0] == digests[1]


def test_a_dry_run_leaves_no_model(workshop):
    done = train("train_sft", *sft_overrides(workshop, "dry"), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not (workshop / "dry" / "export").exists()


@pytest.mark.parametrize(
    ("script", "override", "sentence"),
    [
        ("train_sft", "data.train_path=/nowhere/rows.jsonl", "data.train_path=/nowhere/rows.jsonl: it does not exist"),
        ("train_sft", "trainer.batchsize=3", "trainer.batchsize"),
        ("train_sft", "trainer.micro_batch_size=3", "a divisor of trainer.batch_size=8"),
        ("train_sft", "data.max_length=2", "raise data.max_length"),
    ],
)
def test_mistakes_get_one_sentence_and_a_failing_exit(workshop, script, override, sentence):
    done = train(script, *sft_overrides(workshop, "refused"), override)
    assert done.returncode == 2
    assert sentence in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_fewer_rows_in_a_step_than_ranks_are_refused_before_a_model_is_loaded(workshop, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "9")
    done = train("train_sft", *sft_overrides(workshop, "refused"), "model.init=pretrained")  # there is none
    assert done.returncode == 2
    assert "batch_size=8 cannot be split over 9 ranks" in done.stderr.splitlines()[-1]

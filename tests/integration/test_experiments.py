"""The presets of conf/experiment/: a dry run of each, on a tiny random model of its family and on rows of its data."""

import gzip
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from nemo_style_rlhf.launch.composition import compose
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.local import PPOLocalConfig
from tests.support import warm
from tests.support.paths import ROOT
from tests.support.processes import start_actor, start_server

pytestmark = pytest.mark.more

DATA = ROOT.parent / "shared" / "data"
ROWS = 48
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, ...]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, None),
    "llama": (LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification),
}
LEXICON = DATA / "vader" / "vader_lexicon.txt"


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file of the shared data; none where it is absent."""
    if path.exists():
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            yield from map(json.loads, file)


def gsm8k() -> list[dict[str, Any]]:
    made = [{"question": f"What is {i} + 2?", "answer": f"{i} + 2 = {i + 2}\n#### {i + 2}"} for i in range(ROWS)]
    return list(islice(lines(DATA / "gsm8k" / "train.jsonl"), ROWS)) or made


def dapo() -> list[dict[str, Any]]:
    return [{"prompt": row["question"], "solution": row["answer"].rsplit(" ", 1)[1]} for row in gsm8k()]


def hh() -> list[dict[str, Any]]:
    text = "\n\nHuman: What is {}?\n\nAssistant: A number."
    made = [{"chosen": text.format(i), "rejected": text.format(i) + " No."} for i in range(ROWS)]
    return list(islice(lines(DATA / "hh_rlhf" / "train.jsonl.gz"), ROWS)) or made


def beginnings() -> list[dict[str, Any]]:
    stories = list(islice(lines(DATA / "tinystories" / "stories.jsonl"), ROWS))
    made = [f"Once upon a time there were {i} happy dogs in a house" for i in range(ROWS)]
    return [{"prompt": " ".join(text.split()[:10])} for text in [row["text"] for row in stories] or made]


def tldr() -> list[dict[str, Any]]:
    text = "SUBREDDIT: r/tifu\n\nTITLE: {}\n\nPOST: {} and that was all.\n\nTL;DR:"
    return [{"prompt": text.format(row["prompt"], row["prompt"]), "completion": " all"} for row in beginnings()]


RECIPES = {
    "gsm8k_qwen05b": ("qwen2", gsm8k),
    "dapo_qwen7b": ("qwen2", dapo),
    "hh_rlhf_llama1b": ("llama", hh),
    "tldr_pythia1b": ("gpt_neox", tldr),
    "tldr_pythia1b_grpo": ("gpt_neox", tldr),
    "tinystories_cpu": ("llama", beginnings),
}


def save_model(folder: Path, family: str, *, reward: bool = False) -> Path:
    """Random weights, and a tokenizer that reads and writes bytes."""
    config, policy, scorer = FAMILIES[family]
    alphabet = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    torch.manual_seed(0)
    made = config(**SHAPE, vocab_size=len(alphabet), **({"num_labels": 1} if reward else {}))
    (scorer if reward else policy)(made).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({each: number for number, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    return folder


def test_every_preset_is_tried():
    assert {path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")} == {*RECIPES, "none"}
    assert {path.stem for path in (ROOT / "conf" / "experiment_critic").glob("*.yaml")} < {*RECIPES, "none"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_preset_runs_dry(name, tmp_path):
    family, rows = RECIPES[name]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text(LEXICON.read_text() if LEXICON.exists() else "happy\t2.0\nsad\t-2.0\n")
    words = [
        f"experiment={name}", f"model.path={save_model(tmp_path / 'policy', family)}", "generation=hf",
        f"data.train_path={tmp_path / 'rows.jsonl'}", f"data.val_path={tmp_path / 'rows.jsonl'}", "algorithm.max_steps=2",
        "run.num_threads=1", "--dry-run",
    ]  # fmt: skip
    if not (ROOT / "conf" / "experiment_critic" / f"{name}.yaml").exists():
        command = ["trainers/train_ppo_actor.py", f"run.output_dir={tmp_path / 'run'}", *words]
        done = warm.run(command, timeout=200, environment={**os.environ, "SENTIMENT_LEXICON": str(lexicon)})
        assert done.returncode == 0 and "every phase ran once" in done.stderr, done.stderr
        return
    reward = f"model.path={save_model(tmp_path / 'reward', family, reward=True)}"
    server, port = start_server(tmp_path / "critic", f"experiment_critic={name}", reward, "run.num_threads=1")
    actor = start_actor(tmp_path / "run", port, *words)
    try:
        assert actor.wait(200) == 0 and "every phase ran once" in actor.output(), actor.output()
    finally:
        actor.kill()
        assert server.terminate() == 0


@pytest.mark.parametrize("name", [*RECIPES, "none"])
def test_one_command_for_both_processes_takes_both_halves(name):
    given = [
        "run.output_dir=run",
        "model.path=owner/policy",
        "data.train_path=owner/rows",
        "critic.model.path=owner/reward",
    ]
    config = build(PPOLocalConfig, compose("ppo_local", [f"experiment={name}", *given]))
    expected = {"tldr_pythia1b": (3e-6, 1e-5), "none": (9e-6, 1e-8)}.get(name, (9e-6, 1e-8))
    assert (config.critic.engine.optim.lr, config.critic.engine.optim.eps) == expected
    assert (config.algorithm.max_steps == 1953) == (name == "tldr_pythia1b")

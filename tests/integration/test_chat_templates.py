"""A chat template that is given once, as a file, goes from stage to stage in the exports."""

import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from tests.support import warm
from tests.support.metrics import metrics, samples, without_timers
from tests.support.models import WORDS, save_policy

TEMPLATE = """{%- for message in messages -%}
    {%- if message.role == "assistant" -%}{{ " w61 " + message.content + " <eos>" }}
    {%- else -%}{{ "w60 " + message.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ " w61" }}{%- endif -%}
"""
REWARD = "def reward_func(queries, prompts, labels):\n    return [float(len(query)) for query in queries]\n"
USER, ANSWER = [{"role": "user", "content": "w2 w3"}], [{"role": "assistant", "content": "w4 w5"}]
RENDERED = ["w60", "w2", "w3", "w61"]


DATED = "{{ 'w' + strftime_now('%d') | int | string + ' ' }}" + TEMPLATE
ANOTHER_DAY = {**os.environ, "TZ": "EAST-23" if datetime.now().hour >= 12 else "WEST+23"}
"""The environment of a place where it is tomorrow, or yesterday."""


def run(*words: str, environment: Mapping[str, str] = os.environ) -> str:
    """What the entry point printed."""
    done = warm.run(list(words), timeout=300, environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def train(folder: Path, script: str, name: str, model: str, rows: str, *overrides: str) -> Path:
    run(
        f"trainers/{script}.py", f"run.output_dir={folder / name}", f"model.path={folder / model}", "model.dtype=float32",
        f"data.train_path={folder / rows}.jsonl", "run.num_threads=1", *overrides,
    )  # fmt: skip
    return folder / name


def assert_carried(*exports: Path) -> None:
    """As other programs find it."""
    for export in exports:
        tokenizer = AutoTokenizer.from_pretrained(export)
        ids = tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
        assert [WORDS[token] for token in ids] == RENDERED, export


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model without a chat template, conversations, the template, and SFT with it."""
    folder = tmp_path_factory.mktemp("chat_templates")
    save_policy(folder / "base")
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "reward.py").write_text(REWARD)
    pair = {"chosen": USER + ANSWER, "rejected": [*USER, {"role": "assistant", "content": "w9"}]}
    rows = {"sft": {"messages": USER + ANSWER}, "pairs": pair, "prompts": {"messages": USER}}
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 8)
    steps = ["trainer.batch_size=4", "trainer.max_steps=2"]
    train(folder, "train_sft", "sft", "base", "sft", f"data.chat_template={folder / 'template.jinja'}", *steps)
    assert_carried(folder / "sft" / "export")
    return folder


def ppo(folder: Path, name: str, model: str, *overrides: str) -> Path:
    return train(
        folder, "train_ppo_actor", name, model, "prompts", "algorithm=grpo", "reward=function", "data=messages",
        f"reward.function.path={folder / 'reward.py'}", "algorithm.max_steps=1", "algorithm.num_rollout_samples=8",
        "algorithm.samples_per_prompt=4", "generation.max_length=4", "generation.kv_cache_gib=0.1", *overrides,
    )  # fmt: skip


@pytest.mark.parametrize("script", ["train_reward_model", "train_dpo", "train_kto"])
def test_the_next_stage_takes_it_from_the_export(folder: Path, script: str) -> None:
    steps = ["trainer.batch_size=4", "trainer.max_steps=2", "model.lora.rank=2"]
    stage = train(folder, script, script, "sft/export", "pairs", *steps)
    run("trainers/merge_lora.py", str(stage / "export_adapter"), str(stage / "merged"))
    assert_carried(stage / "export", stage / "merged")
    assert (stage / "export_adapter" / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.more
def test_ppo_and_the_evaluation_of_its_export_do_too(folder: Path) -> None:
    stage = ppo(folder, "ppo", "sft/export", f"data.val_path={folder / 'prompts.jsonl'}", "checkpoint.keep_best=true",
        "algorithm.val_check_interval=1", "algorithm.num_val_samples=2")  # fmt: skip
    assert_carried(stage / "export", stage / "best")
    assert samples(stage, 1)[0]["prompt"].split() == RENDERED
    run(
        "trainers/evaluate.py", f"run.output_dir={folder / 'evaluation'}", "model=fp32", "data.format=messages",
        f"data.path={folder / 'prompts.jsonl'}", f"checkpoints=[{folder / 'sft/export'},{stage / 'export'}]",
        "generation.max_length=4", "generation.kv_cache_gib=0.1",
    )  # fmt: skip


def test_ppo_with_a_template_of_its_own_exports_it_and_notes_both(folder: Path) -> None:
    """From a model that was not trained here; then another template is refused, as after SFT."""
    stage = ppo(folder, "own", "base", f"data.chat_template=@{folder / 'template.jinja'}", "model.lora.rank=2")
    assert_carried(stage / "export")
    assert (stage / "export_adapter" / "chat_template.jinja").read_text() == TEMPLATE
    refused = warm.run(
        [
            "trainers/train_dpo.py", f"run.output_dir={folder / 'refused'}", f"model.path={stage / 'export'}",
            f"data.train_path={folder / 'pairs.jsonl'}", "data.chat_template='{{ messages[0].content }}'",
        ],
        timeout=60,
    )  # fmt: skip
    assert refused.returncode == 2 and "the chat template (sha256 " in refused.stderr


def test_a_template_that_is_missing_is_refused_before_anything_is_loaded(folder: Path) -> None:
    refused = warm.run(
        ["trainers/train_sft.py", "run.output_dir=x", "model.path=none", "data.train_path=none",
         f"data.chat_template={folder / 'none.jinja'}"], timeout=60,
    )  # fmt: skip
    assert refused.returncode == 2
    assert f"error: data.chat_template={folder / 'none.jinja'} cannot be read" in refused.stderr


def test_a_run_that_goes_on_another_day_keeps_the_day_of_its_first_start(folder: Path) -> None:
    """Its chat template writes the date."""
    (folder / "dated.jinja").write_text(DATED)
    settings = [
        f"data.chat_template={folder / 'dated.jinja'}", "engine.optim.lr=1e-2", "engine.scheduler.name=constant",
        "engine.scheduler.warmup_steps=0", "trainer.batch_size=4", "trainer.log_interval=1", "checkpoint.save_interval=2",
    ]  # fmt: skip
    parts = train(folder, "train_sft", "dated_parts", "base", "sft", *settings, "trainer.max_steps=2")

    def day() -> str:
        return str(yaml.safe_load((parts / "config.yaml").read_text())["data"]["today"])

    begun, again = day(), ["trainers/train_sft.py", f"--config-dir={parts}", "--config-name=config"]
    printed = run(*again, "trainer.max_steps=4", "run.resume=must", environment=ANOTHER_DAY)
    assert f"the chat template asks for the date: data.today={begun}" in printed and day() == begun
    on_that_day = [f"data.today={begun}", "trainer.max_steps=4"]
    whole = train(folder, "train_sft", "dated", "base", "sft", *settings, *on_that_day)
    assert without_timers(metrics(parts)) == without_timers(metrics(whole))
    weights = [(stage / "export" / "model.safetensors").read_bytes() for stage in (parts, whole)]
    assert weights[0] == weights[1]
    refused = warm.run([*again, "trainer.max_steps=6", "data.today=2001-01-01"], timeout=300)
    assert refused.returncode == 2 and "is of a run with training data 8 rows" in refused.stderr

"""trainers/evaluate.py with vLLM on real checkpoints, and its results in a real browser."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.support import warm
from tests.support.browser import Browser
from tests.support.entry_points import refusal
from tests.support.models import WORDS, save_chat_tokenizer, save_policy, save_reward_model
from tests.support.paths import ROOT
from tests.support.terminal import unknown_lines
from tests.support.watching import watching

PROMPTS = 12
SAMPLES = 2
MAX_LENGTH = 8
REWARD = """
def reward_func(queries, prompts, labels):
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts))
    return {"rewards": [float(label) for label in labels], "extra_logs": {"length": [len(query) for query in queries]}}
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    save_policy(folder / "sft" / "export", seed=0)
    save_policy(folder / "ppo" / "export", seed=5)
    save_reward_model(folder / "reward", pad_token_id=0)
    save_reward_model(folder / "two_labels", num_labels=2)
    for model in (save_policy(folder / "chat"), save_reward_model(folder / "chat_reward", pad_token_id=0)):
        save_chat_tokenizer(model)
    conversations = [{"messages": [{"role": "user", "content": f"w{i} w{i + 1}"}]} for i in range(PROMPTS)]
    (folder / "messages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations))
    rows = [{"prompt": f"w{i} w{i + 1}", "label": str(i)} for i in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


def arguments(inputs: Path, output_dir: Path) -> list[str]:
    return [
        f"run.output_dir={output_dir}", f"data.path={inputs / 'prompts.jsonl'}", "model=fp32",
        f"checkpoints=[{inputs / 'sft/export'},{inputs / 'ppo/export'},again:{inputs / 'sft/export'}]",
        f"samples_per_prompt={SAMPLES}", f"generation.max_length={MAX_LENGTH}", "generation.kv_cache_gib=0.1",
        "generation.max_num_seqs=5", "generation.max_num_batched_tokens=5",  # vLLM splits prompts
    ]  # fmt: skip


def evaluate(*given: str, warning: str = "none") -> str:
    """The entry point in a process of its own; what it printed. Its messages are those that somebody meant."""
    done = warm.run(["trainers/evaluate.py", *given], timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    idle = r"warning: generation\.\w+=\S+ does nothing: it is vLLM's, .*"  # arguments(), with generation=hf
    kept = r"[\d:]+ INFO \w+: the \d+ responses of an earlier start"
    assert unknown_lines(done.stderr, rf"[\d:]+ WARNING {warning}", idle, kept) == []
    return done.stdout


@pytest.fixture(scope="module")
def evaluation(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of three checkpoints, two of them the same, scored by a reward model."""
    folder = tmp_path_factory.mktemp("evaluation")
    printed = evaluate(*arguments(inputs, folder), f"reward.model.path={inputs / 'reward'}")
    assert f"python trainers/watch.py {folder}" in printed
    return folder


@pytest.fixture(scope="module")
def browser(evaluation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """At the evaluation, as the command that evaluate.py prints shows it."""
    with watching(evaluation) as link, Browser(tmp_path_factory.mktemp("browser")) as running:
        running.open(link)
        yield running


def open_comparison(browser: Browser, evaluation: Path) -> None:
    """The view of the evaluation, with all its prompts."""
    browser.run("document.querySelector('.view')?.remove(), location.hash = '#/compare'")
    browser.wait("document.querySelector('.comparisons') !== null")
    browser.run(f"location.hash = '#/compare?run={evaluation.name}'")
    browser.wait(f"document.querySelectorAll('.row').length === {PROMPTS}")


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def summary(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "summary.json").read_text())["checkpoints"]


def test_every_checkpoint_answers_the_same_prompts_with_the_same_seeds(evaluation: Path):
    rows = results(evaluation)
    assert len(rows) == PROMPTS * SAMPLES * 3
    by_checkpoint = {name: [row for row in rows if row["checkpoint"] == name] for name in ("sft", "ppo", "again")}
    identity = [[(row["prompt"], row["sample"], row["seed"]) for row in group] for group in by_checkpoint.values()]
    assert identity[0] == identity[1] == identity[2]
    assert len({row["seed"] for row in rows}) == PROMPTS * SAMPLES
    responses = {name: [row["response"] for row in group] for name, group in by_checkpoint.items()}
    assert responses["again"] == responses["sft"] != responses["ppo"]
    for row in rows:
        assert row["finish_reason"] == "stop" or row["length"] == MAX_LENGTH
        assert 1 <= row["length"] <= MAX_LENGTH


@pytest.mark.more
def test_many_different_prompts_are_answered_at_vllms_own_settings(inputs: Path, tmp_path: Path):
    """More prompt tokens than vLLM computes in a step (4,096), and no two prompts begin alike."""
    rng = random.Random(0)
    rows = [{"prompt": " ".join(rng.choices(WORDS[2:], k=rng.randint(20, 60)))} for _ in range(200)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate(
        f"run.output_dir={tmp_path}", f"data.path={tmp_path / 'prompts.jsonl'}", "model=fp32", "samples_per_prompt=3",
        f"checkpoints=[{inputs / 'sft/export'}]", f"generation.max_length={MAX_LENGTH}", "generation.kv_cache_gib=0.1",
    )  # fmt: skip
    assert len({(row["prompt_id"], row["response"]) for row in results(tmp_path)}) > 500


def test_scores_are_those_hugging_face_gives(evaluation: Path, inputs: Path):
    """Prompt, response and end-of-text, one at a time, by the class the reward model was saved from."""
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "reward")
    tokenizer = AutoTokenizer.from_pretrained(inputs / "reward")
    for row in results(evaluation)[::7]:
        ids = tokenizer(row["prompt"] + row["response"])["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            (expected,) = model(input_ids=torch.tensor([ids])).logits[0].tolist()
        assert row["score"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.more
@pytest.mark.parametrize("format", ["messages", "text"])
def test_a_beginning_of_text_stands_once_before_what_is_scored(inputs: Path, tmp_path: Path, format: str):
    """A chat template writes it where the tokenizer would add it, too."""
    prompts = inputs / ("messages.jsonl" if format == "messages" else "prompts.jsonl")
    given = [*arguments(inputs, tmp_path), f"data={format}", f"data.path={prompts}", f"checkpoints=[{inputs / 'chat'}]"]
    evaluate(*given, "generation=hf", "data.max_prompts=3", f"reward.model.path={inputs / 'chat_reward'}")
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "chat_reward")
    tokenizer = AutoTokenizer.from_pretrained(inputs / "chat_reward")
    for row in results(tmp_path):
        prompt, response = row["prompt"].removeprefix("<unk>").split(), row["response"].split()
        if format == "messages":  # the template opens each turn with w60, and writes no end-of-text
            words = [*prompt[:-1], "w60", *response]
        else:
            words = [*prompt, *response, "<eos>"]
        ids = tokenizer.convert_tokens_to_ids(["<unk>", *words])
        with torch.no_grad():
            (expected,) = model(input_ids=torch.tensor([ids])).logits[0].tolist()
        assert row["score"] == pytest.approx(expected, abs=1e-5)
        assert row["prompt"].startswith("<unk>") == (format == "messages")


def test_the_summary_follows_from_the_results(evaluation: Path):
    rows = results(evaluation)
    first, second, again = summary(evaluation)
    assert [first["name"], second["name"], again["name"]] == ["sft", "ppo", "again"]
    for found in (first, second, again):
        own = [row for row in rows if row["checkpoint"] == found["name"]]
        assert found["samples"] == len(own) == PROMPTS * SAMPLES
        assert found["mean_score"] == pytest.approx(sum(row["score"] for row in own) / len(own))
        assert found["mean_length"] == pytest.approx(sum(row["length"] for row in own) / len(own))
        assert found["truncated_fraction"] == sum(row["finish_reason"] == "length" for row in own) / len(own)
        assert found["distinct_responses"] == len({row["response"] for row in own})
    assert (first["win_rate"], again["win_rate"]) == (None, 0.5)  # equal responses are equal to the last bit
    score = {(row["checkpoint"], row["prompt_id"], row["sample"]): row["score"] for row in rows}
    pairs = [(prompt_id, index) for prompt_id in range(PROMPTS) for index in range(SAMPLES)]
    differences = [score[("ppo", *pair)] - score[("sft", *pair)] for pair in pairs]
    assert second["win_rate"] == sum(0.5 * (d == 0) + (d > 0) for d in differences) / len(differences)


def test_the_page_shows_what_the_results_hold(evaluation: Path, browser: Browser):
    open_comparison(browser, evaluation)
    assert browser.run("document.getElementById('count').textContent") == f"{PROMPTS} prompts"
    names = browser.run("[...document.querySelectorAll('tbody th')].map((cell) => cell.firstChild.textContent.trim())")
    assert names == ["sft", "ppo", "again"]
    responses = "[...row.querySelectorAll('.cell .answer')].map((response) => response.innerText)"
    shown = browser.run(f"[...document.querySelectorAll('.row')].map((row) => {responses})")
    rows = results(evaluation)
    for prompt_id, texts in enumerate(shown):
        expected = [row for row in rows if row["prompt_id"] == prompt_id]
        assert len(texts) == len(expected) == 3 * SAMPLES
        for text, row in zip(texts, expected, strict=True):
            assert (row["response"].strip() or "empty") in text
            assert f"{row['score']:.3f}".replace("-", "\u2212") in text
            assert ("truncated" in text) == (row["finish_reason"] == "length")
    assert browser.problems == []


def test_the_page_finds_a_response(evaluation: Path, browser: Browser):
    open_comparison(browser, evaluation)
    rows = results(evaluation)
    wanted = next(row["response"] for row in rows if len(row["response"].split()) > 3).strip()
    fitting = {row["prompt_id"] for row in rows if wanted in row["response"] or wanted in row["prompt"]}
    browser.press("/")
    browser.type(wanted)
    browser.wait("document.getElementById('count').textContent.includes('match')")
    browser.wait("document.getElementById('search').value === document.querySelector('mark')?.textContent")
    shown = browser.run("[...document.querySelectorAll('.row')].map((row) => Number(row.dataset.prompt))")
    assert shown == sorted(fitting)
    assert set(browser.run("[...document.querySelectorAll('mark')].map((mark) => mark.textContent)")) == {wanted}
    assert browser.run("document.getElementById('count').textContent").startswith(
        f"{len(fitting)} of {PROMPTS} prompts"
    )


def test_hf_generates_and_a_function_scores(inputs: Path, tmp_path: Path):
    function = [f"reward.function.path={inputs / 'reward.py'}", "data.label_key=label", "reward.function.weight=0.5"]
    evaluate(*arguments(inputs, tmp_path), "generation=hf", "data.max_prompts=3", *function)
    rows = results(tmp_path)
    assert len(rows) == 3 * SAMPLES * 3
    for row in rows:
        assert row["score"] == 0.5 * row["prompt_id"]
        assert row["extra"]["function/length"] == len(row["prompt"] + row["response"])
    assert [found["win_rate"] for found in summary(tmp_path)] == [None, 0.5, 0.5]


@pytest.mark.more
def test_without_a_reward_there_are_responses_and_a_dry_run_writes_nothing(inputs: Path, tmp_path: Path):
    given = [*arguments(inputs, tmp_path), "generation=hf", f"checkpoints=[{inputs / 'sft/export'}]"]
    evaluate(*given, "--dry-run", f"reward.model.path={inputs / 'reward'}")
    assert list(tmp_path.iterdir()) == []
    evaluate(*given, "data.max_prompts=2")
    assert all(row["score"] is None for row in results(tmp_path))
    assert [found["mean_score"] for found in summary(tmp_path)] == [None]


MISTAKES = {
    "missing checkpoint": (["checkpoints=[{inputs}/none]"], r"checkpoints=.*none: there is no such folder"),
    "no checkpoints": (["checkpoints=[]"], r"checkpoints is empty: expected at least one"),
    "one name twice": (
        ["checkpoints=[{inputs}/sft/export,{inputs}/sft]"],
        r"2 checkpoints have the name sft: give each",
    ),
    "missing prompts": (["data.path={inputs}/none.jsonl"], r"data\.path=.*none\.jsonl: it does not exist"),
    "all too long": (["data.max_prompt_length=1"], r"all 12 rows were dropped.*data\.max_prompt_length"),
    "too long for the model": (["generation.max_length=127"], r"makes 129 tokens, more than the 128 positions"),
    "missing reward model": (
        ["reward.model.path={inputs}/none"],
        r"reward\.model\.path=.*none: there is no such folder",
    ),
    "two labels": (["reward.model.path={inputs}/two_labels"], r"two_labels has 2 labels and label_weights are none"),
    "missing function": (
        ["reward.function.path={inputs}/none.py"],
        r"reward\.function\.path=.*none\.py: there is no such file",
    ),
    "unknown key": (["sample_per_prompt=2"], r"sample_per_prompt"),
    "no samples": (["samples_per_prompt=0"], r"samples_per_prompt=0 is not possible"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str, inputs: Path, tmp_path: Path):
    overrides, sentence = MISTAKES[mistake]
    given = [*arguments(inputs, tmp_path), *(override.format(inputs=inputs) for override in overrides)]
    error = refusal("trainers/evaluate.py", given)
    assert re.search(sentence, error), error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.more
def test_a_failing_function_is_one_sentence_or_a_missing_score(inputs: Path, tmp_path: Path):
    (tmp_path / "broken.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [1.0 / (prompts[0] != 'w1 w2')]\n"
    )
    function = [f"reward.function.path={tmp_path / 'broken.py'}", "reward.function.per_sample=true"]
    one = f"checkpoints=[{inputs / 'sft/export'}]"
    given = [*arguments(inputs, tmp_path / "out"), "generation=hf", "data.max_prompts=3", one, *function]
    done = warm.run(["trainers/evaluate.py", *given], timeout=400)
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "results.jsonl").exists()
    (generated,) = (tmp_path / "out" / "responses").iterdir()  # they are there before anything is scored
    before = generated.stat().st_mtime_ns
    evaluate(*given, "reward.on_error=mask", warning="2 of 6 samples have no reward: .*ZeroDivisionError.*")
    assert generated.stat().st_mtime_ns == before
    assert {row["prompt_id"]: row["score"] for row in results(tmp_path / "out")} == {0: 1.0, 1: None, 2: 1.0}
    assert [found["unscored"] for found in summary(tmp_path / "out")] == [SAMPLES]


def generating(process: subprocess.Popen) -> int:
    """The pid of the child that generates, once it is there."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
        time.sleep(0.05)
    raise AssertionError("no process generates")


@pytest.mark.more
@pytest.mark.parametrize("killed", ["generator", "evaluation"])
def test_a_kill_ends_both_processes_and_that_of_the_generator_is_one_sentence(
    inputs: Path, tmp_path: Path, killed: str
):
    """As the kernel does it for lack of memory."""
    command = [sys.executable, "trainers/evaluate.py", *arguments(inputs, tmp_path), "generation=hf"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    child = generating(process)
    os.kill({"generator": child, "evaluation": process.pid}[killed], signal.SIGKILL)
    _, said = process.communicate(timeout=120)  # returns when the child, too, has let go of the pipe: it has ended
    if killed == "generator":
        assert process.returncode == 2
        assert "was killed, most often for lack of memory" in said.splitlines()[-1]

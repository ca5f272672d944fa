"""Judges answer each question once, and their answers become rewards or failures."""

import json
import multiprocessing
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from nemo_style_rlhf.errors import StorageError, UserError
from nemo_style_rlhf.schema.base import validate
from nemo_style_rlhf.schema.common import TokenConfig
from nemo_style_rlhf.schema.judge import JudgeRewardConfig, VerdictConfig
from nemo_style_rlhf.schema.reward import RewardConfig
from nemo_style_rlhf.scoring.interface import Message, ScoringSample
from nemo_style_rlhf.scoring.judge import JudgeScorer
from tests.unit.scoring.judges import Judge, said
from tests.unit.scoring.sources import masked, result, samples, stopped, wait_until

Make = Callable[..., JudgeScorer]
RUBRIC = "Q: {prompt}A: {response}"


def configured(judge: Judge, **settings: Any) -> JudgeRewardConfig:
    settings = {"retries": 2, "cooldown_s": 0.1, "timeout_s": 5.0, "rubric": RUBRIC, "model": "it"} | settings
    config = JudgeRewardConfig(urls=[judge.url], weight=1.0, **settings)
    config.validate()
    return config


@pytest.fixture
def judge() -> Iterator[Judge]:
    made = Judge()
    yield made
    made.close()


@pytest.fixture
def scorer_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr("nemo_style_rlhf.wire.balance.FIRST_RETRY_S", 0.05)
    made = []

    def make(judge: Judge, **settings: Any) -> JudgeScorer:
        made.append(JudgeScorer(configured(judge, **settings), tmp_path / "verdicts"))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def of(prompt: str, response: str, label: str | None = None) -> ScoringSample:
    return ScoringSample.of_texts(torch.tensor([1]), prompt, response, label)


def test_it_is_asked_the_rubric_with_its_settings(judge: Judge, scorer_of: Make) -> None:
    rubric = 'Is {response} {label}? Answer {"score": 1} or {prompt} {prompt}'
    scorer = scorer_of(judge, rubric=rubric, max_tokens=7, seed=None, extra_body={"top_p": 0.5, "stop": ["\n"]})
    scores = result(scorer.score([of("{label}", "{prompt} \\1 {label}", "right")]))
    question = 'Is {prompt} \\1 {label} right? Answer {"score": 1} or {label} {label}'
    assert judge.bodies == [
        {
            "model": "it", "messages": [{"role": "user", "content": question}], "temperature": 0.0, "max_tokens": 7,
            "top_p": 0.5, "stop": ["\n"],
        }
    ]  # fmt: skip
    assert judge.paths == ["/v1/chat/completions"] and judge.keys == [None]
    assert scores.rewards.tolist() == [float(len(question))] and not scores.failures.any()


def test_the_turns_of_an_episode_are_told_apart(judge: Judge, scorer_of: Make) -> None:
    said = [Message("prompt", "p"), Message("response", "a"), Message("environment", "b"), Message("response", "c")]
    scorer = scorer_of(judge, rubric="{prompt}: {turns} ({response})")
    result(scorer.score([ScoringSample(torch.tensor([1]), None, lambda: said)]))
    asked = judge.bodies[0]["messages"][0]["content"]
    assert asked == "p: [response]\na\n\n[environment]\nb\n\n[response]\nc (ac)"


def test_equal_questions_are_asked_once_also_at_the_same_time_and_later(judge: Judge, scorer_of: Make) -> None:
    judge.delay_s = 0.2
    first, second = scorer_of(judge), scorer_of(judge)  # two ranks
    group = [of("p", response) for response in ("a", "bb", "a", "ccc", "bb", "a")]
    asked = [scorer.score(group) for scorer in (first, second, first)]
    assert [result(scores).rewards.tolist() for scores in asked] == [[8.0, 9.0, 8.0, 10.0, 9.0, 8.0]] * 3
    assert sorted(judge.question(number) for number in range(len(judge.bodies))) == [
        "Q: pA: a",
        "Q: pA: bb",
        "Q: pA: ccc",
    ]
    assert result(scorer_of(judge, verdict=VerdictConfig(low=0.0, high=10.0)).score(group)).rewards[0] == pytest.approx(
        0.8
    )
    assert len(judge.bodies) == 3  # how an answer is read is no part of the question
    for change in (
        {"model": "other"},
        {"temperature": 1.0},
        {"seed": 1},
        {"max_tokens": 5},
        {"extra_body": {"top_k": 3}},
    ):
        result(scorer_of(judge, **change).score(group[:1]))
    assert len(judge.bodies) == 8


def ask_in_process(config: JudgeRewardConfig, folder: Path, start: Any, answers: Any) -> None:
    scorer = JudgeScorer(config, folder)
    start.wait()
    answers.put(scorer.score([of("p", str(number)) for number in range(8)]).result(30).rewards.tolist())
    scorer.close()


@pytest.mark.slow("waits for retries and other processes")
def test_processes_that_share_the_folder_ask_once(judge: Judge, tmp_path: Path) -> None:
    judge.delay_s = 0.3
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(2), context.Queue()
    given = (configured(judge), tmp_path / "verdicts", start, answers)
    processes = [context.Process(target=ask_in_process, args=given) for _ in range(2)]
    for process in processes:
        process.start()
    assert [answers.get(timeout=60) for _ in processes] == [[8.0] * 8] * 2
    for process in processes:
        process.join()
    assert len(judge.bodies) == 8
    assert {path.suffix for path in (tmp_path / "verdicts").rglob("*") if path.is_file()} == {".json"}


@pytest.mark.slow("waits for retries and other processes")
def test_one_that_waits_for_a_process_that_was_killed_asks_itself(
    judge: Judge, tmp_path: Path, scorer_of: Make
) -> None:
    judge.delay_s = 1.5
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(1), context.Queue()
    given = (configured(judge), tmp_path / "verdicts", start, answers)
    process = context.Process(target=ask_in_process, args=given)
    process.start()
    wait_until(lambda: judge.bodies, 30.0)
    asked = scorer_of(judge).score([of("p", "3")])
    process.kill()
    process.join()
    assert result(asked).rewards.tolist() == [8.0]


def test_only_the_user_reads_the_verdicts(judge: Judge, scorer_of: Make, tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        result(scorer_of(judge).score([of("p", "r")]))
    finally:
        os.umask(mask)
    below = [tmp_path / "verdicts", *(tmp_path / "verdicts").rglob("*")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in below] == [0o700, 0o700, 0o600]
    assert json.loads(below[2].read_text()) == {"text": "8", "finish_reason": "stop"}


@pytest.mark.slow("waits for retries and other processes")
@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (500, "it broke"), (200, "<html>"), (200, {"choices": []}), (200, ["no"]), (200, {"choices": [{"message": "hi"}]}),
        (200, {"choices": [{"message": {"content": [1]}}]}), (503, {"error": {"message": "loading"}}),
        (200, said(None)), (200, said(" \n", "content_filter")),
    ],
)  # fmt: skip
def test_a_judge_that_fails_is_asked_again(judge: Judge, scorer_of: Make, status: int, answer: Any) -> None:
    judge.script = [(status, answer)] * 2
    assert result(scorer_of(judge).score([of("p", "r")])).rewards.tolist() == [8.0]
    assert len(judge.bodies) == 3
    judge.script = [(status, answer)] * 3
    reason = stopped(scorer_of(judge), [of("p", "other")])
    assert f"3 attempts failed (reward.judge.retries=2), the last because the judge {judge.url} answered " in reason
    assert result(scorer_of(judge).score([of("p", "other")])).rewards.tolist() == [12.0]  # a failure is not kept


@pytest.mark.slow("waits for retries and other processes")
def test_one_that_is_busy_says_when_to_come_back(judge: Judge, scorer_of: Make) -> None:
    judge.script = [(429, {"error": {"message": "slow down"}})]
    began = time.monotonic()
    assert result(scorer_of(judge).score([of("p", "r")])).rewards.tolist() == [8.0]
    assert time.monotonic() - began >= 1.0


@pytest.mark.parametrize(
    ("status", "answer", "said_so"),
    [
        (400, {"error": {"message": "too\nlong"}}, "answered 400 Bad Request (too long): look at its log"),
        (401, {"error": "who?"}, "answered 401 Unauthorized (who?): give its key in reward.judge.token"),
        (404, "", "answered 404 Not Found: correct reward.judge.urls or model"),
    ],
)
def test_a_refusal_concerns_one_sample_and_is_not_repeated(
    judge: Judge, scorer_of: Make, status: int, answer: Any, said_so: str
) -> None:
    judge.script = [(status, answer)]
    scores = masked(scorer_of(judge, concurrency=1), [of("p", "r"), of("p", "other")])
    assert scores.failures.tolist() == [True, False] and scores.rewards[1] == 12.0
    assert len(judge.bodies) == 2
    judge.script = [(status, answer)]
    assert f"the judge {judge.url} {said_so}" in stopped(scorer_of(judge), [of("p", "r")])


def test_a_silent_judge_is_not_waited_for(judge: Judge, scorer_of: Make) -> None:
    judge.delay_s = 2.0
    reason = stopped(scorer_of(judge, timeout_s=0.2, retries=1), [of("p", "r")])
    assert (
        f"the judge {judge.url} did not answer within 0.2 s: raise reward.judge.timeout_s or make it faster" in reason
    )


def test_an_answer_without_a_verdict_is_a_failed_sample_and_is_not_asked_for_again(
    judge: Judge, scorer_of: Make
) -> None:
    judge.script = [(200, said("no idea")), (200, said(None, "length")), (200, said("12 is my", "length"))]
    group = [of("p", response) for response in ("a", "bb", "ccc", "dddd")]
    scores = masked(scorer_of(judge, concurrency=1), group)
    assert scores.failures.tolist() == [True, True, True, False]
    assert "the judge it answered 'no idea', expected a number, " in stopped(scorer_of(judge), group)
    assert "answered '12 is my', cut at reward.judge.max_tokens, expected a number, " in stopped(
        scorer_of(judge), group[2:]
    )
    assert len(judge.bodies) == 4


def test_a_row_without_the_label_that_the_rubric_wants_is_not_asked_about(judge: Judge, scorer_of: Make) -> None:
    scorer = scorer_of(judge, rubric="{response} {label}")
    assert masked(scorer, samples("x", None)).failures.tolist() == [False, True]
    assert "holds {label}, but a row has none: set data.label_key" in stopped(scorer, samples(None))
    assert len(judge.bodies) == 1


@pytest.mark.parametrize("source", ["file", "environment"])
def test_the_key_travels_in_the_header_alone(
    judge: Judge, scorer_of: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "key").write_text("sk-secret\n")
    (tmp_path / "key").chmod(0o600)
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login other password wrong\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    if source == "environment":
        monkeypatch.setenv("NSR_JUDGE_TOKEN", "sk-secret")
    token = TokenConfig(str(tmp_path / "key") if source == "file" else None, "NSR_JUDGE_TOKEN")
    scorer = scorer_of(judge, token=token)
    result(scorer.score([of("p", "r")]))
    assert judge.keys == ["Bearer sk-secret"] and "NSR_JUDGE_TOKEN" not in os.environ
    dumped = OmegaConf.to_yaml(OmegaConf.structured(configured(judge, token=token)))
    kept = "".join(path.read_text() for path in (tmp_path / "verdicts").rglob("*.json"))
    assert "sk-secret" not in dumped + kept + json.dumps(judge.bodies)


def test_a_damaged_verdict_and_a_folder_that_cannot_be_written_are_named(
    judge: Judge, scorer_of: Make, tmp_path: Path
) -> None:
    result(scorer_of(judge).score([of("p", "r")]))
    (kept,) = (tmp_path / "verdicts").rglob("*.json")
    kept.write_text("{")
    with pytest.raises(UserError, match=rf"^{kept}, a judge's verdict, is damaged: delete it"):
        result(scorer_of(judge).score([of("p", "r")]))
    kept.unlink()
    kept.mkdir()
    with pytest.raises(
        StorageError, match=rf"^{kept}, a judge's verdict, cannot be read \(Is a directory\): change its"
    ):
        result(scorer_of(judge).score([of("p", "r")]))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"verdicts cannot be written to .* set reward\.judge\.cache_dir"):
        scorer_of(judge, cache_dir=str(tmp_path / "file"))


def test_closing_ends_what_waits(judge: Judge, scorer_of: Make) -> None:
    judge.script = [(500, "")] * 100
    scorer = scorer_of(judge, retries=50, cooldown_s=60.0)
    asked = scorer.score([of("p", "r")])
    threading.Timer(0.3, scorer.close).start()
    assert str(result(asked).reasons[0]) == "the judges were closed before they answered"


@pytest.mark.parametrize(
    ("changes", "said_so"),
    [
        ({"urls": []}, "reward.judge.weight=1.0 needs addresses: set reward.judge.urls"),
        ({"urls": ["http://me:secret@host/v1"]}, "reward.judge.urls holds a user or password: give the key as "),
        (
            {"urls": ["http://host/v1?api-key=secret"]},
            "reward.judge.urls holds an address with a query or a fragment, ",
        ),
        ({"urls": ["host/v1#secret"]}, "reward.judge.urls holds an address with a query or a fragment, "),
        ({"model": None}, "needs a model: set reward.judge.model"),
        ({"rubric": None}, "needs a rubric: set reward.judge.rubric"),
        ({"rubric": "@none.txt"}, "reward.judge.rubric=none.txt cannot be read (No such file or directory)"),
        ({"rubric": "Good?"}, "reward.judge.rubric holds neither {response} nor {turns}: "),
        ({"rubric": "{response} {lable}"}, "reward.judge.rubric holds {lable}, did you mean {label}? Rename it"),
        (
            {"extra_body": {"messages": []}},
            "reward.judge.extra_body sets messages, which the judge sets itself: take it out",
        ),
        (
            {"verdict": VerdictConfig(low=1.0)},
            "reward.judge.verdict.low=1.0 and reward.judge.verdict.high=None are no scale: ",
        ),
        ({"verdict": VerdictConfig(pattern="(")}, "reward.judge.verdict.pattern=( is no regular expression ("),
        (
            {"verdict": VerdictConfig("json", pattern="x")},
            "is set, but reward.judge.verdict.kind=json reads no pattern: ",
        ),
        (
            {"verdict": VerdictConfig("stars")},
            "reward.judge.verdict.kind=stars is not possible: expected one of number, ",
        ),
        ({"verdict": VerdictConfig("choice", choices={"": 1.0})}, "expected names with finite rewards"),
        ({"temperature": -1.0}, "reward.judge.temperature=-1.0 is not possible"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(changes: dict[str, Any], said_so: str) -> None:
    config = JudgeRewardConfig(**{"urls": ["http://host/v1"], "weight": 1.0, "model": "m", "rubric": RUBRIC} | changes)
    with pytest.raises(UserError) as caught:
        validate(config, "reward.judge.")
    assert said_so in str(caught.value) and "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_a_rubric_in_a_file_becomes_a_part_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "rubric.txt").write_text("Rate {response} from 1 to 5.\n")
    config = RewardConfig(judge=JudgeRewardConfig(rubric=f"@{tmp_path / 'rubric.txt'}"))
    config.judge.validate()
    assert config.judge.rubric == "Rate {response} from 1 to 5." and not config.judge.needs_label

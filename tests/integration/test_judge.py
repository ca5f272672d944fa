"""A judge behind vLLM's OpenAI-compatible server: its verdicts as rewards, each asked for once over the life of a run."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.judge_server import KEY, NAME, judge_server
from tests.support.metrics import metrics, without_timers
from tests.support.models import save_policy
from tests.support.paths import ACTOR_PYTHON, ROOT
from tests.support.processes import Process, proxy, start_actor

pytestmark = pytest.mark.more

STEPS, SAMPLES = 4, 16
ACTOR = [
    "model=fp32", "run.num_threads=1", "run.device=cpu", "algorithm=grpo", "generation=hf", "generation.max_length=6",
    f"algorithm.max_steps={STEPS}", f"algorithm.num_rollout_samples={SAMPLES}", "algorithm.samples_per_prompt=4",
    "engine.optim.lr=1e-2", "checkpoint.save_interval=1",
]  # fmt: skip
TWO_DIGITS = [
    "reward=judge", f"reward.judge.model={NAME}", 'reward.judge.rubric="Rate {prompt}>{response}"', "reward.judge.max_tokens=4",
    "+reward.judge.extra_body={structured_outputs:{regex:'[0-9][0-9]'}}", "reward.judge.temperature=1.0",
    "reward.judge.verdict.low=0", "reward.judge.verdict.high=99",
]  # fmt: skip


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with judge_server(tmp_path_factory.mktemp("judge")) as port:
        yield port


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    save_policy(folder / "policy")
    rows = [{"prompt": f"w{i} w{i + 3}", "response": f"w{2 * i}", "label": "w1"} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o600)
    return folder


class Counter:
    """Counts what the judge answered, and holds back the request that comes after ``limit`` of them, and all later ones."""

    def __init__(self) -> None:
        self.asked = self.answered = 0
        self.limit: int | None = None
        self.reached, self.ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def __call__(self, kind: str, endpoint: str) -> None:
        assert endpoint == "completions"
        with self._lock:
            held = kind == "request" and self.limit is not None and self.asked >= self.limit
            if kind == "response":
                self.answered += 1
            elif not held:
                self.asked += 1
        if held:
            self.reached.set()
            self.ended.wait(60)
            raise ConnectionError


@contextmanager
def counted(judge: int) -> Iterator[tuple[int, Counter]]:
    counter = Counter()
    with proxy(lambda: judge, counter) as port:
        yield port, counter


Start = Callable[..., Process]


def start(inputs: Path, folder: Path, port: int, *overrides: str) -> Process:
    where = [
        f"model.path={inputs / 'policy'}", f"data.train_path={inputs / 'rows.jsonl'}",
        f"reward.judge.urls=[http://127.0.0.1:{port}/v1]", f"reward.judge.token.token_file={inputs / 'key'}",
    ]  # fmt: skip
    return start_actor(folder, 1, *ACTOR, *TWO_DIGITS, *where, *overrides)


def verdicts(folder: Path) -> list[Path]:
    return sorted((folder / "verdicts").rglob("*.json"))


def exported(folder: Path) -> bytes:
    (weights,) = (folder / "export").glob("*.safetensors")
    return weights.read_bytes()


def test_a_run_that_is_killed_and_resumed_asks_nothing_twice_and_repeats(
    judge: int, inputs: Path, tmp_path: Path
) -> None:
    """The judge samples at temperature 1, and the run is killed within its third step, between the verdicts of one rollout. A
    run elsewhere with the same verdicts asks nothing, and ends with the same bits as the run that was killed."""
    with counted(judge) as (port, counter):
        counter.limit = 2 * SAMPLES + 5
        actor = start(inputs, tmp_path / "run", port)
        try:
            assert counter.reached.wait(200), actor.output()
            deadline = time.monotonic() + 60
            while len(verdicts(tmp_path / "run")) < counter.limit:  # what was answered is kept
                assert time.monotonic() < deadline, (counter.asked, counter.answered)
                time.sleep(0.05)
        finally:
            actor.kill()
        counter.ended.set()
        kept = {path: path.read_bytes() for path in verdicts(tmp_path / "run")}
        assert counter.asked == counter.answered == len(kept)
    with counted(judge) as (port, counter):  # another one: what the killed run had sent may still reach the first
        resumed = start(inputs, tmp_path / "run", port)
        assert resumed.wait(200) == 0, resumed.output()
        after = {path: path.read_bytes() for path in verdicts(tmp_path / "run")}
        assert counter.asked == counter.answered == len(after) - len(kept) > 0 and after.items() >= kept.items()
        again = start(inputs, tmp_path / "again", port, f"reward.judge.cache_dir={tmp_path / 'run' / 'verdicts'}")
        assert again.wait(200) == 0, again.output()
        assert counter.asked == len(after) - len(kept)
    rows = without_timers(metrics(tmp_path / "again"))
    assert rows[-STEPS:] == without_timers(metrics(tmp_path / "run"))[-STEPS:]
    assert exported(tmp_path / "again") == exported(tmp_path / "run")
    assert len({row["train_rollouts/rewards"] for row in rows}) == STEPS  # the judge has opinions
    assert KEY not in resumed.output() + "".join(path.read_text() for path in (tmp_path / "run" / "configs").iterdir())


def tried(inputs: Path, judge: int, *overrides: str) -> "subprocess.CompletedProcess[str]":
    command = [
        ACTOR_PYTHON, ROOT / "trainers" / "try_reward.py", "reward=judge", f"data.path={inputs / 'rows.jsonl'}",
        f"reward.judge.urls=[http://127.0.0.1:{judge}/v1]", f"reward.judge.model={NAME}",
        f"reward.judge.token.token_file={inputs / 'key'}", 'reward.judge.rubric="{prompt}>{response}>{label}"',
    ]  # fmt: skip
    return subprocess.run([*command, *overrides], cwd=inputs, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("number", "{regex:'Score: [0-9]'}"),
        ("choice", "{choice:[A,B]}"),
        ("json", "{regex:'[{]\"score\": [0-9][}]'}"),
    ],
)
def test_each_kind_of_verdict_is_read_from_a_real_server(judge: int, inputs: Path, kind: str, form: str) -> None:
    done = tried(
        inputs, judge, f"reward.judge.verdict.kind={kind}", f"+reward.judge.extra_body={{structured_outputs:{form}}}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [
        float(line.split()[-1]) for line in done.stdout.splitlines() if line.split()[:1] and line.split()[0].isdigit()
    ]
    assert len(rewards) == 12 and all(reward == int(reward) for reward in rewards)
    assert kind != "choice" or set(rewards) <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["reward.judge.model=other"],
            "answered 404 Not Found (The model `other` does not exist. ",
        ),
        (
            ["reward.judge.token.token_file=null"],
            "answered 401 Unauthorized (Unauthorized): give its key in reward.judge.token",
        ),
        (["reward.judge.max_tokens=5"], "cut at reward.judge.max_tokens, expected a number, "),
    ],
)
def test_what_a_real_server_refuses_is_one_sentence(judge: int, inputs: Path, overrides: list[str], said: str) -> None:
    done = tried(inputs, judge, *overrides, "data.num_samples=1")
    (error,) = done.stderr.splitlines()
    assert done.returncode == 1 and said in error and KEY not in error, error

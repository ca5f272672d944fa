"""Reward sources: real worker processes, real HTTP endpoints, and every way they go wrong."""

import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from nemo_style_rlhf.critic_service.client import RemoteCritic, ServerUnreachable
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig
from nemo_style_rlhf.schema.reward import EndpointRewardConfig, FunctionRewardConfig, RewardConfig
from nemo_style_rlhf.scoring.combined import CombinedScorer
from nemo_style_rlhf.scoring.contract import arguments, read_answer
from nemo_style_rlhf.scoring.endpoints import EndpointScorer
from nemo_style_rlhf.scoring.function import FunctionScorer
from nemo_style_rlhf.scoring.interface import RewardError, Scores, ScoringSample
from nemo_style_rlhf.scoring.remote import RemoteCriticScorer

WAIT_S = 30.0

REWARDS = '''
from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import sys
import time

import numpy


class Mine(Exception):
    """Cannot be unpickled: it wants two arguments."""

    def __init__(self, left, right):
        super().__init__(f"{left} and {right}")


@dataclasses.dataclass
class Odd:
    what: str


def ignore_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


ANSWERS = {
    "list": lambda n: [float(i) for i in range(n)],
    "numpy": lambda n: numpy.arange(n, dtype=numpy.float16),
    "numbers": lambda n: [numpy.float64(i) for i in range(n)],
    "column": lambda n: numpy.arange(n)[:, None],
    "booleans": lambda n: [i % 2 == 1 for i in range(n)],
    "dict": lambda n: {"rewards": [1.0] * n, "scores": numpy.arange(n), "extra_logs": {"length": numpy.arange(n)}},
    "raise": lambda n: [][0],
    "mine": lambda n: (_ for _ in ()).throw(Mine("one", "two\\nmore")),
    "timeout": lambda n: (_ for _ in ()).throw(TimeoutError("the judge was slow")),
    "exit": lambda n: sys.exit(0),
    "die": lambda n: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda n: time.sleep(600),
    "stubborn": lambda n: ignore_sigterm(),
    "nan": lambda n: [math_nan] * n,
    "short": lambda n: [0.0] * (n - 1),
    "scalar": lambda n: 1.0,
    "string": lambda n: "0.5",
    "words": lambda n: ["good"] * n,
    "none": lambda n: None,
    "holes": lambda n: [None] * n,
    "odd": lambda n: Odd("thing"),
    "generator": lambda n: (1.0 for _ in range(n)),
    "no_rewards": lambda n: {"scores": [1.0] * n},
    "extra_list": lambda n: {"rewards": [1.0] * n, "extra_logs": []},
    "extra_short": lambda n: {"rewards": [1.0] * n, "extra_logs": {"length": [1.0] * (n + 1)}},
    "huge": lambda n: [10**400] * n,
    "pid": lambda n: [float(os.getpid())] * n,
}
math_nan = float("nan")


def reward_func(queries, prompts, labels):
    """What the first label asks for."""
    assert [query[: len(prompt)] for query, prompt in zip(queries, prompts)] == prompts
    return ANSWERS[labels[0]](len(queries))


async def later(queries, prompts, labels):
    await asyncio.sleep(0.01)
    return reward_func(queries, prompts, labels)
'''
TENSORS = """
import torch

ANSWERS = {
    "torch": lambda n: torch.arange(n, dtype=torch.bfloat16).requires_grad_(),
    "tensors": lambda n: [torch.tensor(float(i)) for i in range(n)],
}


def reward_func(queries, prompts, labels):
    return ANSWERS[labels[0]](len(queries))
"""


def samples(*labels):
    return [
        ScoringSample(torch.tensor([1, 2]), f"prompt {i} ", f"response {i}", label) for i, label in enumerate(labels)
    ]


def result(future):
    return future.result(WAIT_S)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s=15.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def masked(source, group):
    """The same group with on_error=mask."""
    return result(CombinedScorer({"it": (source, 1.0)}, on_error="mask").score(group))


def stopped(source, group):
    """What a run that stops would say."""
    with pytest.raises(RewardError) as caught:
        result(CombinedScorer({"it": (source, 1.0)}, on_error="stop").score(group))
    said = str(caught.value)
    assert said.count("set reward.on_error=mask to train without such samples") == 1
    assert "\n" not in said and len(said) < 400
    return said


def all_failed(scores, count):
    return len(scores.rewards) == count and scores.rewards.isnan().all() and scores.failures.all()


# --- functions --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rewards_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture(scope="module")
def functions(rewards_file):
    """Scorers that share their worker processes with every test of this module."""
    made = {
        "group": FunctionScorer(FunctionRewardConfig(path=str(rewards_file), weight=1.0, timeout_s=1.0, processes=1)),
        "single": FunctionScorer(
            FunctionRewardConfig(path=str(rewards_file), weight=1.0, per_sample=True, timeout_s=1.0, processes=2)
        ),
        "async": FunctionScorer(
            FunctionRewardConfig(path=str(rewards_file), weight=1.0, name="later", timeout_s=1.0, processes=1)
        ),
    }
    yield made
    for scorer in made.values():
        scorer.close()


def test_a_function_is_given_queries_prompts_and_labels():
    group = [*samples("a"), ScoringSample(torch.tensor([1]), "p", "r")]
    assert arguments(group) == {
        "queries": ["prompt 0 response 0", "pr"],
        "prompts": ["prompt 0 ", "p"],
        "labels": ["a", None],
    }


@pytest.mark.parametrize("kind", ["list", "numpy", "numbers", "column"])
@pytest.mark.parametrize("scorer", ["group", "async"])
def test_numbers_of_any_kind_are_rewards(functions, scorer, kind):
    scores = result(functions[scorer].score(samples(kind, "x", "x")))
    assert torch.equal(scores.rewards, torch.tensor([0.0, 1.0, 2.0]))
    assert scores.rewards.dtype == torch.float32
    assert not scores.failures.any()


def test_tensors_are_rewards(tmp_path):
    path = tmp_path / "tensors.py"
    path.write_text(TENSORS)
    scorer = FunctionScorer(FunctionRewardConfig(path=str(path), weight=1.0, processes=1))
    try:
        for kind in ("torch", "tensors"):
            assert result(scorer.score(samples(kind, "x", "x"))).rewards.tolist() == [0.0, 1.0, 2.0]
    finally:
        scorer.close()


def test_booleans_are_rewards(functions):
    assert result(functions["group"].score(samples("booleans", "x"))).rewards.tolist() == [0.0, 1.0]


def test_a_dict_has_scores_and_more_metrics(functions):
    scores = result(functions["group"].score(samples("dict", "x", "x")))
    assert scores.rewards.tolist() == [1.0, 1.0, 1.0]
    assert scores.filter_scores.tolist() == [0.0, 1.0, 2.0]
    assert scores.extra["length"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "kind, said",
    [
        ("raise", r"raised IndexError: list index out of range \(line \d+\): correct it"),
        ("mine", r"raised Mine: one and two \(line \d+\): correct it"),
        ("timeout", r"raised TimeoutError: the judge was slow \(line \d+\): correct it"),
        ("exit", r"raised SystemExit: 0 \(line \d+\): correct it"),
        ("die", "ended its process with exit code -9"),
        ("nan", "answered with nan as number 1 of rewards, expected finite numbers: correct what it returns"),
        ("short", "answered with 2 rewards, expected 3 numbers, one for each query: correct what it returns"),
        ("scalar", "answered with 1 rewards, expected 3 numbers"),
        ("string", "answered with rewards='0.5', expected 3 numbers"),
        ("words", r"answered with rewards=\['good', 'good', 'good'\], expected 3 numbers"),
        ("none", "answered with rewards=None, expected 3 numbers"),
        ("holes", r"answered with rewards=\[None, None, None\], expected 3 numbers"),
        ("odd", "answered with rewards=\"Odd\\(what='thing'\\)\", expected 3 numbers"),
        ("generator", "answered with rewards='<generator object"),
        ("huge", r"answered with rewards=\[10+\.\.\., expected 3 numbers"),
        ("no_rewards", r"answered with the keys \['scores'\], expected rewards among them: correct what it returns"),
        ("extra_list", r"answered with extra_logs=\[\], expected a dict of numbers"),
        ("extra_short", r"answered with 4 extra_logs\['length'\], expected 3 numbers"),
    ],
)
def test_a_function_that_answers_wrongly_stops_the_run_or_is_masked(functions, rewards_file, caplog, kind, said):
    group = samples(kind, "x", "x")
    whole = rf"^the reward function reward_func of {rewards_file} {said}.*, or set reward.on_error=mask"
    assert (sentence := stopped(functions["group"], group)) and re.search(whole, sentence), sentence
    with caplog.at_level(logging.WARNING):
        assert all_failed(masked(functions["group"], group), 3)
    assert "3 of 3 samples have no reward: the reward function" in caplog.text
    assert result(functions["group"].score(samples("list"))).rewards.tolist() == [0.0]


def test_a_function_that_hangs_is_killed_and_the_next_call_works(functions):
    scorer = functions["group"]
    pid = int(result(scorer.score(samples("pid"))).rewards[0])
    assert alive(pid)
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"ran longer than 1 s and was killed: raise reward\.function\.timeout_s"):
        result(scorer.score(samples("stubborn", "x")))
    assert time.monotonic() - started < 8.0
    assert not alive(pid)
    assert int(result(scorer.score(samples("pid"))).rewards[0]) != pid


def test_per_sample_failures_concern_one_sample_each(functions):
    group = samples("list", "hang", "raise", "nan", "die", "list", "dict")
    scores = masked(functions["single"], group)
    assert scores.failures.tolist() == [False, True, True, True, True, False, False]
    assert scores.rewards.isnan().tolist() == scores.failures.tolist()
    assert scores.rewards[[0, 5, 6]].tolist() == [0.0, 0.0, 1.0]
    assert scores.extra["it/length"][6] == 0.0 and scores.extra["it/length"][:6].isnan().all()
    # Filtering looks at the reward of samples without a score of their own.
    assert scores.filter_scores[[0, 5, 6]].tolist() == [0.0, 0.0, 0.0]
    assert scores.filter_scores.isnan().tolist() == scores.failures.tolist()


def test_per_sample_failures_stop_the_run_with_the_first_reason(functions):
    assert "raised IndexError" in stopped(functions["single"], samples("list", "raise", "nan"))


def test_a_worker_that_dies_between_calls_is_replaced(rewards_file):
    scorer = FunctionScorer(FunctionRewardConfig(path=str(rewards_file), weight=1.0, timeout_s=5.0, processes=1))
    try:
        pid = int(result(scorer.score(samples("pid"))).rewards[0])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid))
        time.sleep(0.5)  # let the pool notice
        assert int(result(scorer.score(samples("pid"))).rewards[0]) != pid
    finally:
        scorer.close()


def test_importing_the_file_does_not_count_as_time_of_a_call(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text(
        "import time\ntime.sleep(1.5)\ndef reward_func(queries, prompts, labels): return [1] * len(queries)\n"
    )
    scorer = FunctionScorer(FunctionRewardConfig(path=str(path), weight=1.0, timeout_s=0.5, processes=1))
    try:
        assert result(scorer.score(samples("x"))).rewards.tolist() == [1.0]
    finally:
        scorer.close()


def test_workers_end_with_a_killed_trainer(tmp_path):
    note, path = tmp_path / "pid", tmp_path / "endless.py"
    path.write_text(
        f"import os, pathlib\ndef reward_func(queries, prompts, labels):\n"
        f"    pathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n    while True: pass\n"
    )
    trainer = tmp_path / "trainer.py"
    trainer.write_text(
        textwrap.dedent(f"""
        import torch
        from nemo_style_rlhf.schema.reward import FunctionRewardConfig
        from nemo_style_rlhf.scoring.function import FunctionScorer
        from nemo_style_rlhf.scoring.interface import ScoringSample
        if __name__ == "__main__":
            scorer = FunctionScorer(FunctionRewardConfig(path={str(path)!r}, weight=1.0, processes=1))
            scorer.score([ScoringSample(torch.tensor([1]), "p", "r")]).result()
        """)
    )
    process = subprocess.Popen([sys.executable, str(trainer)])
    try:
        wait_until(lambda: note.exists() and note.read_text(), WAIT_S)
        assert alive(int(note.read_text()))
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not alive(int(note.read_text())))


@pytest.mark.parametrize(
    "source, name, said",
    [
        (None, "reward_func", r"there is no file .*rewards\.py: reward\.function\.path must name"),
        ("def other(): pass", "reward_func", r"rewards\.py has no function reward_func: set reward\.function\.name"),
        ("reward_func = 1", "reward_func", r"rewards\.py has no function reward_func: set reward\.function\.name"),
        ("def f(:\n  pass", "f", r"cannot be imported: SyntaxError: .* \(line 1\): correct .*rewards\.py"),
        ("\nimport no_such_thing", "f", r"ModuleNotFoundError: No module named 'no_such_thing' \(line 2\): correct"),
        ("raise SystemExit(3)", "f", r"cannot be imported: SystemExit: 3 \(line 1\): correct"),
    ],
)
def test_a_file_without_the_function_is_refused_at_once(tmp_path, source, name, said):
    path = tmp_path / "rewards.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(UserError, match=said) as caught:
        FunctionScorer(FunctionRewardConfig(path=str(path), name=name, weight=1.0))
    assert "\n" not in str(caught.value)


def test_a_file_may_have_any_name(tmp_path):
    path = tmp_path / "rewards"
    path.write_text("def reward_func(queries, prompts, labels): return [0.5]")
    scorer = FunctionScorer(FunctionRewardConfig(path=str(path), weight=1.0, processes=1))
    try:
        assert result(scorer.score(samples("x"))).rewards.tolist() == [0.5]
    finally:
        scorer.close()


# --- endpoints --------------------------------------------------------------------------------------------------------


class Endpoint:
    """A reward endpoint in a thread of this process; ``behave`` is what it does with a request."""

    def __init__(self, behave="rewards", port=0):
        self.behave = behave
        self.bodies = []
        self.gate = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.bodies.append(body)
                status, answer = endpoint.answer(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(answer.encode())

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/get_reward"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, body):
        count = len(body["query"])
        rewards = [float(len(query)) for query in body["query"]]
        match self.behave:
            case "slow" | "gated":
                self.gate.wait(10.0)
            case "error":
                return 500, "it broke"
            case "garbage":
                return 200, "<html>not\nJSON</html>"
            case "short":
                return 200, json.dumps([1.0] * (count - 1))
            case "nan":
                return 200, json.dumps({"rewards": [math.nan] * count})
        return 200, json.dumps({"rewards": rewards, "scores": [1.0] * count, "extra_logs": {"words": [2] * count}})

    def close(self):
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def endpoints():
    """Make endpoints, and scorers that are asked of; all are closed."""
    made = []

    def make(*behaviours):
        new = [Endpoint(behaviour) for behaviour in behaviours]
        made.extend(new)
        return new

    yield make
    for endpoint in made:
        endpoint.close()


@pytest.fixture
def scorer_of(monkeypatch):
    monkeypatch.setattr("nemo_style_rlhf.scoring.endpoints.FIRST_RETRY_S", 0.05)
    made = []

    def make(*urls, **settings):
        settings = {"retries": 1, "timeout_s": 5.0, "cooldown_s": 0.6} | settings
        config = EndpointRewardConfig(urls=[getattr(url, "url", url) for url in urls], weight=1.0, **settings)
        config.validate()
        made.append(EndpointScorer(config))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def test_an_endpoint_is_sent_openrlhfs_request(endpoints, scorer_of):
    (endpoint,) = endpoints("rewards")
    scores = result(scorer_of(endpoint).score([*samples("42"), ScoringSample(torch.tensor([1]), "p", "r")]))
    assert endpoint.bodies == [
        {"query": ["prompt 0 response 0", "pr"], "prompts": ["prompt 0 ", "p"], "labels": ["42", None]}
    ]
    assert scores.rewards.tolist() == [19.0, 2.0]
    assert scores.filter_scores.tolist() == [1.0, 1.0] and scores.extra["words"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "behaviour, said",
    [
        ("slow", r"URL did not answer within 0\.3 s: raise reward\.endpoints\.timeout_s"),
        ("error", "URL answered 500 Internal Server Error: look at its log"),
        ("garbage", r"URL answered '<html>not\\nJSON</html>', expected JSON: correct what it returns"),
        ("short", "URL answered with 1 rewards, expected 2 numbers, one for each query: correct what it returns"),
        ("nan", "URL answered with nan as number 1 of rewards, expected finite numbers: correct what it returns"),
    ],
)
def test_an_endpoint_that_fails_stops_the_run_or_is_masked(endpoints, scorer_of, behaviour, said):
    (endpoint,) = endpoints(behaviour)
    scorer = scorer_of(endpoint, retries=2, timeout_s=0.3)
    expected = r"^3 attempts failed \(reward\.endpoints\.retries=2\), the last because the reward endpoint "
    sentence = stopped(scorer, samples("x", "y"))
    assert re.search(expected + said.replace("URL", endpoint.url), sentence), sentence
    assert len(endpoint.bodies) == 3
    assert all_failed(masked(scorer, samples("x", "y")), 2)
    assert len(endpoint.bodies) == 6


def test_an_endpoint_that_is_down_stops_the_run_or_is_masked(endpoints, scorer_of):
    (endpoint,) = endpoints("rewards")
    endpoint.server.shutdown()
    endpoint.server.server_close()
    scorer = scorer_of(endpoint, retries=0)
    said = f"the reward endpoint {endpoint.url} cannot be reached: start it, or correct reward.endpoints.urls, or set"
    assert said in stopped(scorer, samples("x"))
    assert all_failed(masked(scorer, samples("x")), 1)


def test_retries_wait_for_an_endpoint_that_restarts(endpoints, scorer_of):
    (endpoint,) = endpoints("rewards")
    port = endpoint.server.server_port
    endpoint.server.shutdown()
    endpoint.server.server_close()
    future = scorer_of(endpoint, retries=5).score(samples("x"))
    time.sleep(0.3)
    assert not future.done()
    again = Endpoint(port=port)
    try:
        assert result(future).rewards.tolist() == [19.0]
    finally:
        again.close()


def test_the_other_endpoint_takes_over_and_the_dead_one_is_taken_back(endpoints, scorer_of):
    sick, well = endpoints("error", "rewards")
    scorer = scorer_of(sick, well, retries=1, cooldown_s=0.6)
    for _ in range(4):
        assert result(scorer.score(samples("x"))).rewards.tolist() == [19.0]
    assert len(sick.bodies) == 1 and len(well.bodies) == 4  # it was asked once and left alone
    sick.behave = "rewards"
    time.sleep(0.7)
    assert result(scorer.score(samples("x"))).rewards.tolist() == [19.0]
    assert len(sick.bodies) == 2 and len(well.bodies) == 4


def test_requests_go_to_the_least_busy_endpoint(endpoints, scorer_of):
    busy, free = endpoints("gated", "rewards")
    scorer = scorer_of(busy, free)
    waiting = scorer.score(samples("x"))
    wait_until(lambda: busy.bodies)
    for _ in range(5):
        result(scorer.score(samples("x")))
    assert len(busy.bodies) == 1 and len(free.bodies) == 5
    assert not waiting.done()
    busy.gate.set()
    result(waiting)


def test_closing_does_not_wait_for_retries(endpoints, scorer_of):
    (endpoint,) = endpoints("error")
    scorer = scorer_of(endpoint, retries=1000)
    future = scorer.score(samples("x"))
    wait_until(lambda: endpoint.bodies)
    started = time.monotonic()
    scorer.close()
    assert time.monotonic() - started < 2.0
    with pytest.raises(RewardError, match="closed before they answered"):
        result(future)


# --- several at once --------------------------------------------------------------------------------------------------


class Given:
    """A source whose answer is known."""

    def __init__(self, outcome):
        self.outcome, self.closed = outcome, False

    def score(self, samples):
        future = Future()
        if isinstance(self.outcome, Exception):
            future.set_exception(self.outcome)
        else:
            future.set_result(self.outcome)
        return future

    def close(self):
        self.closed = True


def test_rewards_add_up_by_weight(functions, endpoints, scorer_of):
    (endpoint,) = endpoints("rewards")
    sources = {"function": (functions["group"], 2.0), "endpoints": (scorer_of(endpoint), -0.5)}
    scores = result(CombinedScorer(sources, on_error="stop").score(samples("dict", "x", "x")))
    assert scores.rewards.tolist() == [2.0 - 9.5] * 3
    assert scores.filter_scores.tolist() == [1.0, 2.0, 3.0]
    assert {name: value.tolist() for name, value in scores.extra.items()} == {
        "function/length": [0.0, 1.0, 2.0],
        "endpoints/words": [2.0, 2.0, 2.0],
        "function/reward": [1.0, 1.0, 1.0],
        "endpoints/reward": [19.0, 19.0, 19.0],
    }
    assert scores.values is None and not scores.failures.any()


def test_a_source_of_weight_0_gives_its_values_only(functions):
    critic = Given(Scores(rewards=torch.tensor([math.inf, 5.0]), values=torch.arange(7.0)))
    scores = result(
        CombinedScorer({"critic": (critic, 0.0), "function": (functions["group"], 1.0)}, on_error="stop").score(
            samples("list", "x")
        )
    )
    assert scores.rewards.tolist() == [0.0, 1.0]
    assert scores.values.tolist() == list(range(7))
    assert "critic/reward" not in scores.extra and "function/reward" not in scores.extra


def test_masking_keeps_the_values_of_the_critic_and_the_other_samples(functions):
    values = torch.arange(6.0)
    critic = Given(Scores(rewards=torch.tensor([1.0, 2.0, 3.0]), filter_scores=torch.ones(3), values=values))
    sources = {"critic": (critic, 1.0), "function": (functions["single"], 1.0)}
    scores = result(CombinedScorer(sources, on_error="mask").score(samples("list", "raise", "list")))
    assert torch.equal(scores.values, values)
    assert scores.failures.tolist() == [False, True, False]
    assert scores.rewards[[0, 2]].tolist() == [1.0, 3.0] and scores.rewards[1].isnan()
    assert scores.filter_scores[1].isnan() and not scores.filter_scores[[0, 2]].isnan().any()
    whole = {"critic": (critic, 1.0), "function": (functions["group"], 1.0)}
    scores = result(CombinedScorer(whole, on_error="mask").score(samples("raise", "x", "x")))
    assert all_failed(scores, 3) and torch.equal(scores.values, values)


@pytest.mark.parametrize("on_error", ["stop", "mask"])
@pytest.mark.parametrize("error", [KeyError("a bug"), UserError("not of a source")])
def test_errors_that_are_no_source_failures_are_never_masked(on_error, error):
    with pytest.raises(type(error)) as caught:
        result(CombinedScorer({"it": (Given(error), 1.0)}, on_error=on_error).score(samples("x")))
    assert caught.value is error


@pytest.mark.parametrize("on_error", ["stop", "mask"])
def test_a_critic_that_cannot_be_reached_is_never_masked(endpoints, on_error):
    (endpoint,) = endpoints("rewards")
    endpoint.server.shutdown()
    endpoint.server.server_close()
    config = RemoteCriticConfig(port=endpoint.server.server_port, retries=0)
    with RemoteCritic(config) as critic, pytest.raises(ServerUnreachable, match="no critic server answers"):
        result(CombinedScorer({"critic": (RemoteCriticScorer(critic), 1.0)}, on_error=on_error).score(samples("x")))


def test_closing_closes_every_source():
    sources = [Given(Scores(torch.zeros(1))), Given(Scores(torch.zeros(1)))]
    CombinedScorer({"a": (sources[0], 1.0), "b": (sources[1], 1.0)}, on_error="stop").close()
    assert [source.closed for source in sources] == [True, True]


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, said",
    [
        (FunctionRewardConfig(weight=1.0), "needs the function's file: set reward.function.path"),
        (FunctionRewardConfig(timeout_s=0.0), "reward.function.timeout_s=0.0 is not possible"),
        (FunctionRewardConfig(processes=0), "reward.function.processes=0 is not possible"),
        (EndpointRewardConfig(weight=1.0), "needs addresses: set reward.endpoints.urls"),
        (EndpointRewardConfig(urls=["localhost:5000"]), "reward.endpoints.urls=localhost:5000 is not possible"),
        (EndpointRewardConfig(timeout_s=-1.0), "reward.endpoints.timeout_s=-1.0 is not possible"),
        (EndpointRewardConfig(retries=-1), "reward.endpoints.retries=-1 is not possible"),
        (EndpointRewardConfig(cooldown_s=-1.0), "reward.endpoints.cooldown_s=-1.0 is not possible"),
        (RewardConfig(on_error="ignore"), "reward.on_error=ignore is not possible"),
    ],
)
def test_impossible_settings_are_refused(config, said):
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        config.validate()


def test_a_run_needs_a_source_of_rewards():
    config = RewardConfig()
    config.critic.weight = 0.0
    with pytest.raises(UserError, match="no reward source is in use"):
        config.validate()


def test_scores_of_a_wrong_length_are_refused():
    with pytest.raises(RewardError, match="it answered with 1 scores, expected 2 numbers"):
        read_answer({"rewards": [1, 2], "scores": [1]}, 2, "it")

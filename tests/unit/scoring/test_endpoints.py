"""Reward endpoints over HTTP, and every way they go wrong."""

import re
import time

import pytest
import torch

from nemo_style_rlhf.scoring.http import is_loopback
from nemo_style_rlhf.scoring.interface import RewardError, ScoringSample
from tests.unit.scoring.sources import Endpoint, all_failed, masked, result, samples, stopped, wait_until


def test_an_endpoint_is_sent_openrlhfs_request(endpoints, scorer_of):
    (endpoint,) = endpoints("rewards")
    scores = result(scorer_of(endpoint).score([*samples("42"), ScoringSample.of_texts(torch.tensor([1]), "p", "r")]))
    assert endpoint.bodies == [
        {"query": ["prompt 0 response 0", "pr"], "prompts": ["prompt 0 ", "p"], "labels": ["42", None]}
    ]
    assert scores.rewards.tolist() == [19.0, 2.0]
    assert scores.filter_scores.tolist() == [1.0, 1.0] and scores.extra["words"].tolist() == [2.0, 2.0]


@pytest.mark.slow("waits for endpoints that do not answer")
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
    assert time.monotonic() - started < 20  # a thousand retries take minutes
    with pytest.raises(RewardError, match="closed before they answered"):
        result(future)


def test_an_endpoint_on_this_host_is_not_asked_through_a_proxy(endpoints, scorer_of, monkeypatch):
    """Whose localhost is another one."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    (endpoint,) = endpoints("rewards")
    assert len(result(scorer_of(endpoint, retries=0).score(samples("42"))).rewards) == 1
    assert [is_loopback(url) for url in ("http://[::1]:1/x", "http://localhost/", "http://10.0.0.1", "https://a.b")] == [
        True, True, False, False,
    ]  # fmt: skip

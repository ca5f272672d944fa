"""Reward endpoints over HTTP: load balancing, retries, and a pause for those that fail."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import requests

from nemo_style_rlhf.schema.reward import EndpointRewardConfig
from nemo_style_rlhf.scoring.contract import arguments, read_answer
from nemo_style_rlhf.scoring.interface import RewardError, Scores, ScoringSample

THREADS_PER_ENDPOINT = 4


@dataclass
class _Endpoint:
    url: str
    running: int = 0
    """Requests it is working on."""
    resting_until: float = 0.0
    """time.monotonic() before which it is asked only if no other is left."""


class EndpointScorer:
    """POST {"query", "prompts", "labels"} to one of several equal endpoints, as OpenRLHF's remote reward models take it."""

    def __init__(self, config: EndpointRewardConfig) -> None:
        self._config = config
        self._endpoints = [_Endpoint(url) for url in config.urls]
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS_PER_ENDPOINT * len(config.urls), thread_name_prefix="reward-endpoint")

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        return self._pool.submit(self._score, list(samples))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _score(self, samples: list[ScoringSample]) -> Scores:
        """
        Raises:
            RewardError: every attempt failed; the sentence has the last reason.
        """
        given = arguments(samples)
        body = {"query": given["queries"], "prompts": given["prompts"], "labels": given["labels"]}
        for _ in range(self._config.retries + 1):
            endpoint = self._take()
            try:
                return read_answer(self._post(endpoint, body), len(samples), f"the reward endpoint {endpoint.url}")
            except (requests.RequestException, RewardError) as error:
                endpoint.resting_until = time.monotonic() + self._config.cooldown_s
                last = (
                    error if isinstance(error, RewardError) else _explain(endpoint.url, error, self._config.timeout_s)
                )
            finally:
                with self._lock:
                    endpoint.running -= 1
        raise RewardError(f"{last} ({self._config.retries + 1} attempts, reward.endpoints.retries)") from last

    def _post(self, endpoint: _Endpoint, body: Mapping[str, object]) -> object:
        answer = requests.post(endpoint.url, json=body, timeout=self._config.timeout_s)
        if not answer.ok:
            raise RewardError(f"the reward endpoint {endpoint.url} answered {answer.status_code} {answer.reason}")
        try:
            return answer.json()
        except ValueError as error:
            raise RewardError(
                f"the reward endpoint {endpoint.url} answered with no JSON: {answer.text[:60]!r}"
            ) from error

    def _take(self) -> _Endpoint:
        """The healthy endpoint with the fewest running requests; where all are resting, the one that has rested longest."""
        with self._lock:
            now = time.monotonic()
            healthy = [endpoint for endpoint in self._endpoints if endpoint.resting_until <= now]
            if healthy:
                chosen = min(healthy, key=lambda endpoint: endpoint.running)
            else:
                chosen = min(self._endpoints, key=lambda endpoint: endpoint.resting_until)
            chosen.running += 1
            return chosen


def _explain(url: str, error: requests.RequestException, timeout_s: float) -> RewardError:
    if isinstance(error, requests.Timeout):
        return RewardError(
            f"the reward endpoint {url} did not answer within {timeout_s:g} s (reward.endpoints.timeout_s)"
        )
    if isinstance(error, requests.ConnectionError):
        return RewardError(f"the reward endpoint {url} cannot be reached: is it up?")
    return RewardError(f"the request to the reward endpoint {url} failed: {error}")

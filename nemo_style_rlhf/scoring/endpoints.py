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
FIRST_RETRY_S = 0.5
LONGEST_RETRY_WAIT_S = 10.0


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
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(THREADS_PER_ENDPOINT * len(config.urls), thread_name_prefix="reward-endpoint")

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        return self._pool.submit(self._score, list(samples))

    def close(self) -> None:
        self._closing.set()
        self._pool.shutdown(cancel_futures=True)

    def _score(self, samples: list[ScoringSample]) -> Scores:
        """
        Raises:
            RewardError: every attempt failed; the sentence has the last reason.
        """
        given = arguments(samples)
        body = {"query": given["queries"], "prompts": given["prompts"], "labels": given["labels"]}
        wait_s = FIRST_RETRY_S
        for attempt in range(self._config.retries + 1):
            if attempt > 0 and self._all_rest():
                self._closing.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_RETRY_WAIT_S)
            if self._closing.is_set():
                break
            endpoint = self._take()
            try:
                scores = read_answer(self._post(endpoint, body), len(samples), f"the reward endpoint {endpoint.url}")
                endpoint.resting_until = 0.0
                return scores
            except (requests.RequestException, RewardError) as error:
                endpoint.resting_until = time.monotonic() + self._config.cooldown_s
                last = error if isinstance(error, RewardError) else self._explain(endpoint.url, error)
            finally:
                with self._lock:
                    endpoint.running -= 1
        else:
            raise RewardError(
                f"{self._config.retries + 1} attempts failed (reward.endpoints.retries={self._config.retries}), "
                f"the last because {last}"
            ) from last
        raise RewardError("the reward endpoints were closed before they answered")

    def _post(self, endpoint: _Endpoint, body: Mapping[str, object]) -> object:
        answer = requests.post(endpoint.url, json=body, timeout=self._config.timeout_s)
        if not answer.ok:
            raise RewardError(
                f"the reward endpoint {endpoint.url} answered {answer.status_code} {answer.reason}: look at its log"
            )
        try:
            return answer.json()
        except ValueError as error:
            raise RewardError(
                f"the reward endpoint {endpoint.url} answered {answer.text[:60]!r}, expected JSON: correct what it returns"
            ) from error

    def _all_rest(self) -> bool:
        with self._lock:
            return all(endpoint.resting_until > time.monotonic() for endpoint in self._endpoints)

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

    def _explain(self, url: str, error: requests.RequestException) -> RewardError:
        if isinstance(error, requests.Timeout):
            return RewardError(
                f"the reward endpoint {url} did not answer within {self._config.timeout_s:g} s: "
                "raise reward.endpoints.timeout_s or make it faster"
            )
        if isinstance(error, requests.ConnectionError):
            return RewardError(
                f"the reward endpoint {url} cannot be reached: start it, or correct reward.endpoints.urls"
            )
        return RewardError(f"the request to the reward endpoint {url} failed ({error}): correct reward.endpoints.urls")

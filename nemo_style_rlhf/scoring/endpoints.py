"""Reward endpoints over HTTP: load balancing, retries, and a rest for endpoints that fail."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import requests

from nemo_style_rlhf.schema.reward import EndpointRewardConfig
from nemo_style_rlhf.scoring.balance import LeastBusy
from nemo_style_rlhf.scoring.contract import arguments, read_answer
from nemo_style_rlhf.scoring.interface import RewardError, Scores, ScoringSample

THREADS_PER_ENDPOINT = 4


class EndpointScorer:
    """Posts {"query", "prompts", "labels"} to one of several equal endpoints, as OpenRLHF's remote reward models expect it."""

    def __init__(self, config: EndpointRewardConfig, *, rank: int = 0) -> None:
        self._config = config
        self._endpoints = LeastBusy(config.urls, rest_s=config.cooldown_s, first=rank)
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
            RewardError: every attempt failed; the sentence gives the last reason.
        """
        given = arguments(samples)
        body = {"query": given["queries"], "prompts": given["prompts"], "labels": given["labels"]}
        for _ in self._endpoints.attempts(self._config.retries + 1, self._closing):
            if self._closing.is_set():
                break
            try:
                with self._endpoints.take() as url:
                    return read_answer(self._post(url, body), len(samples), f"the reward endpoint {url}")
            except (requests.RequestException, RewardError) as error:
                last = error if isinstance(error, RewardError) else self._explain(url, error)
        else:
            raise RewardError(
                f"{self._config.retries + 1} attempts failed (reward.endpoints.retries={self._config.retries}), "
                f"the last because {last}"
            ) from last
        raise RewardError("the reward endpoints were closed before they answered")

    def _post(self, url: str, body: Mapping[str, object]) -> object:
        answer = requests.post(url, json=body, timeout=self._config.timeout_s)
        if not answer.ok:
            raise RewardError(
                f"the reward endpoint {url} answered {answer.status_code} {answer.reason}: look at its log"
            )
        try:
            return answer.json()
        except ValueError as error:
            raise RewardError(
                f"the reward endpoint {url} answered {answer.text[:60]!r}, expected JSON: correct what it returns"
            ) from error

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

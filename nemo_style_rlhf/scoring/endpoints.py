"""Reward endpoints over HTTP, as OpenRLHF's remote reward models."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from nemo_style_rlhf.schema.judge import EndpointRewardConfig
from nemo_style_rlhf.scoring.contract import arguments, read_answer
from nemo_style_rlhf.scoring.http import HttpServers
from nemo_style_rlhf.scoring.interface import Scores, ScoringSample

THREADS_PER_ENDPOINT = 4


class EndpointScorer:
    """Posts {"query", "prompts", "labels"} to one of several interchangeable endpoints."""

    def __init__(self, config: EndpointRewardConfig, *, rank: int = 0) -> None:
        self._endpoints = HttpServers(config, rank=rank)
        self._pool = ThreadPoolExecutor(THREADS_PER_ENDPOINT * len(config.urls), thread_name_prefix="reward-endpoint")

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        return self._pool.submit(self._score, list(samples))

    def close(self) -> None:
        self._endpoints.close()
        self._pool.shutdown(cancel_futures=True)

    def _score(self, samples: list[ScoringSample]) -> Scores:
        given = arguments(samples)
        body = {"query": given["queries"], "prompts": given["prompts"], "labels": given["labels"]}
        return self._endpoints.ask(body, lambda answer, source: read_answer(answer, len(samples), source))

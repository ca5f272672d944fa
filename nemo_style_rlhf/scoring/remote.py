"""Scores of the critic process, and of a reward-only server."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from nemo_style_rlhf.critic_service.client import CriticInference, RemoteCritic, ServerUnreachable
from nemo_style_rlhf.critic_service.protocol import Array, ProtocolError
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.reward import RewardServerConfig
from nemo_style_rlhf.scoring.balance import LeastBusy
from nemo_style_rlhf.scoring.futures import caught, mapped
from nemo_style_rlhf.scoring.interface import RewardError, Scores, ScoringSample

LOGGER = logging.getLogger(__name__)
THREADS_PER_REPLICA = 2


class RemoteCriticScorer:
    """Values, and the rewards of the reward model beside the critic."""

    def __init__(self, critic: RemoteCritic, *, with_rewards: bool = True) -> None:
        """``with_rewards=False`` leaves the reward at 0: another source gives it."""
        self._critic = critic
        self._with_rewards = with_rewards

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        return mapped(self._critic.infer([sample.tokens.numpy().astype(np.int32) for sample in samples]), self._scores)

    def close(self) -> None:
        """The connection belongs to the trainer."""

    def _scores(self, result: CriticInference) -> Scores:
        values = torch.cat([torch.tensor(values, dtype=torch.float32) for values in result.values])
        if not self._with_rewards:
            return Scores(rewards=torch.zeros(len(result.values)), values=values)
        assert result.rewards is not None  # the handshake demanded a reward model
        return Scores(rewards=torch.tensor(result.rewards, dtype=torch.float32), values=values)


class RewardServerScorer:
    """Rewards of text, by one or more servers of one reward model, whose tokenizer may be another one than the policy's."""

    def __init__(self, config: RewardServerConfig, progress: Callable[[str], None]) -> None:
        """Wait for all servers.

        Args:
            progress: gets a line every few seconds.

        Raises:
            UserError: one does not answer, serves no reward model, or another one than the first.
        """
        self._config = config
        self._servers = [RemoteCritic(server) for server in config.servers]
        for server in self._servers:
            server.require_rewards(server.wait_until_ready(progress))
        self._model = _served(self._servers[0])
        self._replicas = LeastBusy(self._servers, rest_s=config.cooldown_s)
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(THREADS_PER_REPLICA * len(self._servers), thread_name_prefix="reward-server")
        for server in self._servers[1:]:
            self._require_same(server)

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        texts = [sample.prompt for sample in samples], [sample.response for sample in samples]
        ask = self._ask_one if len(self._servers) == 1 else self._ask_any
        asked: Future[Any] = self._pool.submit(ask, *texts)
        return mapped(caught(asked, ServerUnreachable, ProtocolError), self._scores)

    def close(self) -> None:
        self._closing.set()
        for server in self._servers:
            server.close()
        self._pool.shutdown(cancel_futures=True)

    def _ask_one(self, prompts: list[str], responses: list[str]) -> Array | Exception:
        self._require_same(self._servers[0])
        return self._servers[0].score_text(prompts, responses).result()

    def _ask_any(self, prompts: list[str], responses: list[str]) -> Array | Exception:
        """The rewards, or why the texts are refused, as the other replicas would.

        Raises:
            ServerUnreachable, ProtocolError: no replica answered, ``retries`` times in a row.
        """
        for attempt in self._replicas.attempts(self._config.retries + 1, self._closing):
            try:
                with self._replicas.take() as server:
                    self._require_same(server)  # what comes back may be another one
                    # Texts that are refused are no fault of this server.
                    return caught(server.score_text(prompts, responses), ProtocolError).result()
            except (ServerUnreachable, ProtocolError) as error:
                if attempt == self._config.retries or self._closing.is_set():
                    raise
                LOGGER.warning("%s; another replica is asked", error)
        raise AssertionError("the last attempt returns or raises")

    def _require_same(self, server: RemoteCritic) -> None:
        if (served := _served(server)) != self._model:
            raise UserError(
                f"the reward server at {server.address} serves the model {served[0][:16]}, the run began with "
                f"{self._model[0][:16]}: serve the same one, configured alike, on all replicas and after a restart"
            )

    @staticmethod
    def _scores(rewards: "Array | Exception") -> Scores:
        if isinstance(rewards, Exception):
            reason = rewards.message if isinstance(rewards, ProtocolError) else rewards
            raise RewardError(str(reason)) from rewards  # not the critic's: nothing to go back to
        return Scores(rewards=torch.tensor(rewards, dtype=torch.float32))


def _served(server: RemoteCritic) -> tuple[str, str]:
    status = server.status()
    return status.model_digest, status.config_digest

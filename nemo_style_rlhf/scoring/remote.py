"""Scores from the critic process, and from a reward-only server."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_style_rlhf.critic_service.client import wait_for_any
from nemo_style_rlhf.critic_service.protocol import Status, Want
from nemo_style_rlhf.critic_service.remote_critic import CriticInference, RemoteCritic
from nemo_style_rlhf.critic_service.remote_reward import RemoteRewardModel
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.chat import Chat
from nemo_style_rlhf.schema.reward import RewardServerConfig
from nemo_style_rlhf.schema.templates import unrendered
from nemo_style_rlhf.scoring.futures import caught, mapped
from nemo_style_rlhf.scoring.interface import RewardError, Scores, ScoringSample
from nemo_style_rlhf.wire.balance import LeastBusy
from nemo_style_rlhf.wire.connection import ServerUnreachable
from nemo_style_rlhf.wire.messages import Array, ProtocolError

LOGGER = logging.getLogger(__name__)
THREADS_PER_REPLICA = 2
Model = tuple[str, str, bool]
"""Digests of a reward model and of the settings that decide its numbers; whether it computes with ``run.deterministic``."""


class RemoteCriticScorer:
    """Values from the critic, and rewards from the reward model next to it."""

    def __init__(self, critic: RemoteCritic, *, want: Want = "both") -> None:
        """``want="values"`` leaves the rewards at 0, for runs that get them from another source."""
        self._critic = critic
        self._want = want

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        return self.ask([sample.tokens for sample in samples])

    def ask(self, sequences: Sequence[Tensor], critic_step: int | None = None) -> "Future[Scores]":
        """Score token ids, int64 [L] each; with ``critic_step``, only a critic of exactly that step may answer."""
        tokens = [sequence.numpy().astype(np.int32) for sequence in sequences]
        return mapped(self._critic.infer(tokens, want=self._want, expect_critic_step=critic_step), self._scores)

    def close(self) -> None:
        """Do nothing: the connection belongs to the trainer."""

    @staticmethod
    def _scores(result: CriticInference) -> Scores:
        if result.values is None:  # the reward model is frozen: its rewards are the same at every critic step
            return Scores(rewards=torch.tensor(result.rewards, dtype=torch.float32))
        values = torch.cat([torch.tensor(values, dtype=torch.float32) for values in result.values])
        rewards = torch.zeros(len(result.values)) if result.rewards is None else torch.tensor(result.rewards)
        return Scores(rewards=rewards, values=values, critic_steps=result.critic_steps)


class RewardServerScorer:
    """Rewards of text, from one or more servers of one reward model, whose tokenizer may differ from the policy's."""

    def __init__(
        self,
        config: RewardServerConfig,
        model: Model,
        *,
        prompt_template: str | None = None,
        rank: int = 0,
    ) -> None:
        """Connect to the servers of ``config``.

        Args:
            model: result of :func:`served_by`, the same on every rank.
            prompt_template: the policy's template, removed from the prompts; the server applies the reward model's.
        """
        self._config = config
        self._model = model
        self._prompt_template = prompt_template
        self._servers = [RemoteRewardModel(server) for server in config.servers]
        self._replicas = LeastBusy(self._servers, rest_s=config.cooldown_s, first=rank)
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(THREADS_PER_REPLICA * len(self._servers), thread_name_prefix="reward-server")

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        prompts = [sample.chat or unrendered(self._prompt_template, sample.prompt) for sample in samples]
        responses = [sample.response for sample in samples]
        ask = self._ask_one if len(self._servers) == 1 else self._ask_any
        asked: Future[Any] = self._pool.submit(ask, prompts, responses)
        return mapped(caught(asked, ServerUnreachable, ProtocolError), self._scores)

    def close(self) -> None:
        self._closing.set()
        for server in self._servers:
            server.close()
        self._pool.shutdown(cancel_futures=True)

    def _ask_one(self, prompts: list[str | Chat], responses: list[str]) -> Array | Exception:
        server = self._servers[0]
        _require_same(server, server.status(), self._model)
        return server.score_text(prompts, responses).result()

    def _ask_any(self, prompts: list[str | Chat], responses: list[str]) -> Array | Exception:
        """The rewards, or the error with which the texts are refused; the other replicas would refuse them, too.

        Raises:
            UserError, ProtocolError: every replica failed, and then ``retries`` more attempts.
        """
        last = self._config.retries + len(self._servers) - 1
        for attempt in self._replicas.attempts(last + 1, self._closing):
            try:
                with self._replicas.take() as server:
                    _require_same(server, server.status(), self._model)  # a restarted server may serve another model
                    # A refusal of texts does not count as a failure of this server.
                    asked = server.score_text(prompts, responses)
                    return caught(asked, ProtocolError).result()
            except (UserError, ProtocolError) as error:
                if attempt == last or self._closing.is_set():
                    raise
                LOGGER.warning("%s; another replica is asked", error)
        raise AssertionError("the last attempt returns or raises")

    @staticmethod
    def _scores(rewards: "Array | Exception") -> Scores:
        if isinstance(rewards, Exception):
            reason = rewards.message if isinstance(rewards, ProtocolError) else rewards
            raise RewardError(str(reason)) from rewards  # a run would recover from the loss of a critic, not from this
        return Scores(rewards=torch.tensor(rewards, dtype=torch.float32))


def served_by(
    config: RewardServerConfig, progress: Callable[[str], None], heed: Callable[[], None] = lambda: None, *,
    conversations: bool = False, needs_bits: bool = False,
) -> Model:  # fmt: skip
    """Wait until a server answers, and check all that answer by then; requests go to the others once they answer.

    Args:
        progress, heed: as for :func:`wait_for_any`.
        conversations: whether prompts are conversations of more than a question, so that they need a chat template.
        needs_bits: whether the servers must compute as ``run.deterministic`` asks.

    Raises:
        UserError: no server answers; or a server that answers serves no reward model, a different one from the first server's, or
            one that cannot read conversations.
    """
    with ExitStack() as connections:
        servers = [connections.enter_context(RemoteRewardModel(server)) for server in config.servers]
        answers = wait_for_any(servers, progress, heed)
        model = _model(next(iter(answers.values())))
        for server in servers:
            if server in answers:
                server.require_rewards(answers[server])
                _require_same(server, answers[server], model)
                if needs_bits and not answers[server].repeatable:
                    raise UserError(
                        f"run.deterministic=true, but the reward server at {server.address} was started without it: start it "
                        "with run.deterministic=true"
                    )
                if conversations and not answers[server].reads_conversations:
                    raise UserError(
                        f"the reward model of the server at {server.address} reads no conversations of several turns, which "
                        "the prompts are: serve a decoder whose tokenizer has a chat template"
                    )
            else:
                progress(f"no reward server answers at {server.address} yet: the others are asked")
    return model


def _require_same(server: RemoteRewardModel, status: Status, model: Model) -> None:
    if (served := _model(status)) != model:
        raise UserError(
            f"the reward server at {server.address} serves the model {served[0][:16]}, the run began with "
            f"{model[0][:16]}: serve the same one, configured alike, on all replicas and after a restart"
        )


def _model(status: Status) -> Model:
    return status.model_digest, status.config_digest, status.repeatable

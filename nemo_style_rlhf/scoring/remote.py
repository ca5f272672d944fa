"""Scores of the critic process, and of a reward-only server."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch

from nemo_style_rlhf.critic_service.client import CriticInference, RemoteCritic
from nemo_style_rlhf.critic_service.protocol import Array
from nemo_style_rlhf.scoring.futures import mapped
from nemo_style_rlhf.scoring.interface import Scores, ScoringSample


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
    """Rewards of text, by a server whose reward model may have another tokenizer."""

    def __init__(self, server: RemoteCritic) -> None:
        self._server = server

    def score(self, samples: Sequence[ScoringSample]) -> "Future[Scores]":
        answer = self._server.score_text([sample.prompt for sample in samples], [s.response for s in samples])
        return mapped(answer, self._scores)

    def close(self) -> None:
        self._server.close()

    @staticmethod
    def _scores(rewards: Array) -> Scores:
        return Scores(rewards=torch.tensor(rewards, dtype=torch.float32))

"""Rewards and values of the critic process."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from nemo_style_rlhf.critic_service.client import CriticInference, RemoteCritic
from nemo_style_rlhf.scoring.interface import Scores


class RemoteCriticScorer:
    def __init__(self, critic: RemoteCritic) -> None:
        self._critic = critic

    def score(self, sequences: Sequence[Tensor]) -> "Future[Scores]":
        inference = self._critic.infer([sequence.numpy().astype(np.int32) for sequence in sequences])
        scores: Future[Scores] = Future()
        inference.add_done_callback(lambda done: _convert(done, scores))
        return scores


def _convert(done: "Future[CriticInference]", scores: "Future[Scores]") -> None:
    if error := done.exception():
        scores.set_exception(error)
        return
    result = done.result()
    assert result.rewards is not None  # the handshake demanded a reward model
    scores.set_result(
        Scores(
            rewards=torch.tensor(result.rewards, dtype=torch.float32),
            values=torch.cat([torch.tensor(values, dtype=torch.float32) for values in result.values]),
        )
    )

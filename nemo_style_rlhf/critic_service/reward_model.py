"""The frozen reward model, alone or beside a critic."""

from dataclasses import dataclass

import numpy as np
import torch

from nemo_style_rlhf.critic_service.batches import Batches
from nemo_style_rlhf.critic_service.protocol import InferRequest
from nemo_style_rlhf.critic_service.worker_group import Message, WorkerGroup
from nemo_style_rlhf.data.reward_text import RewardText
from nemo_style_rlhf.models.host_copy import HostCopy
from nemo_style_rlhf.models.scalar import PooledModel, ScalarModel
from nemo_style_rlhf.transport.messages import Array


@dataclass(frozen=True)
class Score(Message[Array]):
    """Compute rewards float32 [B] of the sequences that a rank answers for; 0 for others."""

    request: InferRequest
    micro_batches: list[tuple[list[int], bool]]
    """As in :class:`Share`."""


class RewardModel:
    """Answers :meth:`rewards` and handles :class:`Score`. Not thread-safe: one message at a time."""

    def __init__(
        self, model: ScalarModel | PooledModel, text: RewardText, batches: Batches, group: WorkerGroup, *,
        offload: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            text: turns texts into sequences.
            group: worker group whose ranks share the sequences; each has the whole model.
            offload: keep the weights in host memory from :meth:`rest` to the next score.
        """
        group.join({Score: self._score})
        self.text = text
        self._group = group
        self._model = model.requires_grad_(False).eval()
        self._batches = batches
        self._host_copy = HostCopy(self._model, batches.device) if offload else None
        if self._host_copy is None:
            self._model.to(batches.device)

    def rewards(self, request: InferRequest) -> Array:
        """On the first rank: rewards float32 [B]."""
        shares = self._batches.shares(request.lengths)
        answers = self._group.run_each([Score(share.of(request), share.steps[0]) for share in shares])
        rewards = np.zeros(len(request.lengths), dtype=np.float32)
        for share, answer in zip(shares, answers, strict=True):
            counted = share.counted
            rewards[[share.rows[place] for place in counted]] = answer[counted]
        return rewards

    @torch.no_grad()
    def _score(self, message: Score) -> Array:
        request = message.request
        rewards = torch.zeros(len(request.lengths))
        if self._host_copy is not None:
            self._host_copy.load()
        for rows, counts in message.micro_batches:
            if counts:
                token_ids, attention_mask = self._batches.inputs(request, rows)
                rewards[rows] = self._model.rewards(token_ids, attention_mask)[: len(rows)].cpu()
        return rewards.numpy()

    def rest(self) -> None:
        """Free the device's memory if weights are offloaded."""
        if self._host_copy is not None:
            self._host_copy.rest()

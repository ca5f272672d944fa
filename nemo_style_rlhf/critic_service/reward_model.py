"""The frozen reward model, alone or beside a critic."""

from dataclasses import dataclass

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
    """Compute rewards float32 [B]."""

    request: InferRequest


class RewardModel:
    """Handles :class:`Score`. Not thread-safe: one message at a time."""

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

    @torch.no_grad()
    def _score(self, message: Score) -> Array:
        request = message.request
        lengths = request.lengths.tolist()
        rewards = torch.zeros(len(lengths))
        if self._host_copy is not None:
            self._host_copy.load()
        for rows, counts in self._group.shard(self._batches.split(lengths)):
            if not counts:
                continue
            token_ids, attention_mask = self._batches.inputs(request, rows)
            rewards[rows] = self._model.rewards(token_ids, attention_mask)[: len(rows)].cpu()
        return self._group.sum(rewards).numpy()

    def rest(self) -> None:
        """Free the device's memory if weights are offloaded."""
        if self._host_copy is not None:
            self._host_copy.rest()

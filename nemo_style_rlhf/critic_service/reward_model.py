"""The frozen reward model, with or without a critic."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from nemo_style_rlhf.critic_service.batches import Batches
from nemo_style_rlhf.critic_service.protocol import InferRequest
from nemo_style_rlhf.critic_service.worker_group import RankMessage, WorkerGroup
from nemo_style_rlhf.data.reward_text import RewardText
from nemo_style_rlhf.engine.engine import sharded
from nemo_style_rlhf.engine.storages import Storages, weights_of
from nemo_style_rlhf.models.host_copy import HostCopy
from nemo_style_rlhf.models.scalar import PooledModel, ScalarModel
from nemo_style_rlhf.schema.common import EngineConfig
from nemo_style_rlhf.wire.messages import Array


@dataclass(frozen=True)
class Score(RankMessage[Array]):
    """Compute rewards float32 [B] of the sequences that a rank answers for; 0 for others."""

    request: InferRequest
    micro_batches: list[tuple[list[int], bool]]
    """As in :class:`Share`."""


class _Rewards(nn.Module):
    """Computes a model's rewards in its forward, so that ZeRO-3 gathers the weights."""

    def __init__(self, model: ScalarModel | PooledModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model.rewards(token_ids, attention_mask)


class RewardModel:
    """Answers :meth:`rewards` and handles :class:`Score`. Not thread-safe: one message at a time."""

    def __init__(
        self, model: ScalarModel | PooledModel, text: RewardText, batches: Batches, group: WorkerGroup, *,
        offload: bool = False, engine: EngineConfig | None = None,
    ) -> None:  # fmt: skip
        """Freeze the model and place it on the device.

        Args:
            model: in host memory.
            text: turns texts into sequences.
            group: worker group whose ranks share the sequences. Each has the whole model, or a shard if ``engine`` asks for ZeRO
                stage 3 and ``offload`` does not.
            offload: keep the weights in host memory from :meth:`rest` to the next score.
        """
        group.join({Score: self._score})
        self.text = text
        self._group = group
        model.requires_grad_(False).eval()
        self._rewards: Callable[[Tensor, Tensor], Tensor] = model.rewards
        self._model, self._batches = model, batches
        self._shards = Storages(lambda: weights_of(model), batches.device)
        self._host_copy = HostCopy(model, batches.device) if offload else None
        self._sharded = engine is not None and engine.zero_stage == 3 and not offload
        if engine is not None and self._sharded:
            self._rewards = sharded(_Rewards(model), engine, batches.device)
        elif not offload:
            model.to(batches.device)

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
        self._shards.reload()
        if self._host_copy is not None:
            self._host_copy.load()
        for rows, counts in message.micro_batches:
            if counts or self._sharded:
                found = self._rewards(*self._batches.inputs(request, rows))
                if counts:
                    rewards[rows] = found[: len(rows)].cpu()
        return rewards.numpy()

    def sleep(self) -> None:
        """Free the device's memory until the next score."""
        if self._sharded:
            self._shards.offload()
        elif self._host_copy is None:
            self._host_copy = HostCopy(self._model.cpu(), self._batches.device)
        self.rest()

    def rest(self) -> None:
        """Free the device's memory if weights are offloaded."""
        if self._host_copy is not None:
            self._host_copy.rest()

"""The frozen policy that KL is measured against."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.models.host_copy import HostCopy
from nemo_style_rlhf.models.lora import adapters_off
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.rollout.logprobs import PolicyForward, batch_logprobs
from nemo_style_rlhf.schema.common import EngineConfig


class Reference(Protocol):
    def logprobs(
        self, tokens: Tensor, lengths: Sequence[int], mask: Tensor, temperatures: Tensor | None = None
    ) -> Tensor:
        """[N] float32, see :func:`batch_logprobs`."""


class AdaptersOff:
    """The trained policy with its adapters switched off, so that no second model is needed."""

    def __init__(
        self, policy: PolicyForward, module: nn.Module, config: EngineConfig, device: torch.device, ranks: Ranks
    ) -> None:
        """``module`` holds the adapters of ``policy``."""
        self._policy, self._module = policy, module
        self._config, self._device, self._ranks = config, device, ranks

    def logprobs(
        self, tokens: Tensor, lengths: Sequence[int], mask: Tensor, temperatures: Tensor | None = None
    ) -> Tensor:
        with adapters_off(self._module):
            return batch_logprobs(
                self._policy, tokens, lengths, mask, self._config, self._device, self._ranks, temperatures
            )


class FrozenCopy:
    """A copy of the policy as it was at the start of the run; never trained, never saved."""

    def __init__(
        self, model: PolicyModel, config: EngineConfig, device: torch.device, ranks: Ranks, *, cpu_offload: bool
    ) -> None:
        """With ``cpu_offload`` the copy is on ``device`` only while it computes. Each of ``ranks`` has a whole copy."""
        self._model = model.eval().requires_grad_(False)
        self._config = config
        self._device, self._ranks = device, ranks
        self._host_copy = HostCopy(self._model, device) if cpu_offload else None
        if self._host_copy is None:
            self._model.to(device)

    def logprobs(
        self, tokens: Tensor, lengths: Sequence[int], mask: Tensor, temperatures: Tensor | None = None
    ) -> Tensor:
        if self._host_copy is not None:
            self._host_copy.load()
        result = batch_logprobs(
            self._model, tokens, lengths, mask, self._config, self._device, self._ranks, temperatures
        )
        if self._host_copy is not None:
            self._host_copy.rest()
        return result

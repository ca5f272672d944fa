"""The frozen policy that KL is measured against."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.rollout.logprobs import batch_logprobs
from nemo_style_rlhf.schema.common import EngineConfig


class Reference:
    """A copy of the policy as it was at the start of the run; never trained, never saved."""

    def __init__(self, model: PolicyModel, config: EngineConfig, device: torch.device, *, cpu_offload: bool) -> None:
        """With ``cpu_offload`` it is on ``device`` only while it computes."""
        self._model = model.eval().requires_grad_(False)
        self._config = config
        self._device = device
        self._cpu_offload = cpu_offload and device.type != "cpu"
        if not self._cpu_offload:
            self._model.to(device)

    def logprobs(
        self, tokens: Tensor, lengths: Sequence[int], mask: Tensor, temperatures: Tensor | None = None
    ) -> Tensor:
        """[N] float32, see :func:`batch_logprobs`."""
        if self._cpu_offload:
            self._model.to(self._device)
        result = batch_logprobs(self._model, tokens, lengths, mask, self._config, self._device, temperatures)
        if self._cpu_offload:
            self._model.to("cpu")
        return result

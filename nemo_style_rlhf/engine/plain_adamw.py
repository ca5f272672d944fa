"""The optimizer of ZeRO stage 0, where every rank has whole weights and whole states."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MASTERS = "masters"
"""Key of the state dict: the fp32 masters in the order of the weights, if there are any."""


class PlainAdamW(torch.optim.AdamW):
    """AdamW that clips the gradient, and gives bf16 weights fp32 masters (arXiv 1710.03740).

    It has no flat buffers: only shards need them.
    """

    def __init__(self, weights: Iterable[Tensor], *, clip: float, **settings: Any) -> None:
        """``clip`` is the largest L2 norm of the gradient, 0 for any; ``settings`` are AdamW's."""
        weights = list(weights)
        masters = [weight.detach().float() if weight.dtype == torch.bfloat16 else weight for weight in weights]
        self._pairs = [pair for pair in zip(weights, masters, strict=True) if pair[0] is not pair[1]]
        """The bf16 weights, each with its master."""
        self._clip = clip
        self.grad_norm = 0.0
        """The global L2 norm of the last step's gradient, before it was clipped."""
        super().__init__(masters, **settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update weights and masters. Gradients in bf16 are freed on the way, so that one copy exists at a time."""
        for weight, master in self._pairs:
            master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        masters: list[Tensor] = self.param_groups[0]["params"]
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        self.grad_norm = float(norm)
        if self._clip:
            torch.nn.utils.clip_grads_with_norm_(masters, self._clip, norm)
        super().step()
        for weight, master in self._pairs:
            weight.copy_(master)
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._pairs:
            state[MASTERS] = [master.detach() for master in self.param_groups[0]["params"]]
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for master, saved in zip(self.param_groups[0]["params"], state_dict.get(MASTERS, ()), strict=False):
            master.copy_(saved)

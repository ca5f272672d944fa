"""The optimizer of ZeRO stage 0, where every rank has whole weights and whole states."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MASTERS = "masters"
"""Key of the state dict: the fp32 masters in the order of the weights, if there are any."""


class PlainAdamW(torch.optim.AdamW):
    """AdamW that clips the gradient, and gives weights of lower precision fp32 masters (arXiv 1710.03740).

    It has no flat buffers: on one rank, the copies into and out of those take longer than AdamW itself.
    """

    def __init__(self, weights: Iterable[Tensor], *, clip: float, **settings: Any) -> None:
        """``clip`` is the largest L2 norm of the gradient, 0 for any; ``settings`` are AdamW's."""
        self._weights = list(weights)
        self._clip = clip
        self.grad_norm = 0.0
        """Of the last step, before clipping."""
        super().__init__(
            [weight.detach().float() if _is_lower(weight) else weight for weight in self._weights], **settings
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update weights and masters. Gradients of lower precision are freed on the way, so that one copy exists at a time."""
        masters: list[Tensor] = self.param_groups[0]["params"]
        for weight, master in zip(self._weights, masters, strict=True):
            if _is_lower(weight):
                master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        self.grad_norm = float(norm)
        if self._clip:
            torch.nn.utils.clip_grads_with_norm_(masters, self._clip, norm)
        super().step()
        for weight, master in zip(self._weights, masters, strict=True):
            if _is_lower(weight):
                weight.copy_(master)
                master.grad = None

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if any(map(_is_lower, self._weights)):
            state[MASTERS] = [master.detach() for master in self.param_groups[0]["params"]]
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for master, saved in zip(self.param_groups[0]["params"], state_dict.get(MASTERS, ()), strict=False):
            master.copy_(saved)


def _is_lower(weight: Tensor) -> bool:
    return weight.dtype in (torch.bfloat16, torch.float16)

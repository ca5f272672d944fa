"""Fixtures that unit tests of several rooms share."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture
def copying_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving a tensor to the CPU copies it, as to another device."""
    to: Callable[..., Tensor] = Tensor.to

    def copied(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        moved = to(tensor, *args, **kwargs)
        return moved.clone() if args and isinstance(args[0], torch.device) else moved

    monkeypatch.setattr(Tensor, "to", copied)

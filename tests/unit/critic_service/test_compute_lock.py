"""Who may touch the models."""

from types import SimpleNamespace
from typing import NoReturn

import pytest

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.compute_lock import ComputeLock
from nemo_style_rlhf.critic_service.protocol import InferRequest, Limits
from nemo_style_rlhf.critic_service.reward_server import reward_handler
from nemo_style_rlhf.wire.messages import ProtocolError


def test_after_a_fault_nothing_more_is_computed() -> None:
    """The process ends a second later; meanwhile a repeated train step would apply its first mini-batches twice."""

    def broken(_: InferRequest) -> NoReturn:
        raise RuntimeError("out of memory")

    text = SimpleNamespace(token_ids=lambda prompt, response: [1, 2])
    reward = SimpleNamespace(text=text, rewards=broken)
    infer = reward_handler(reward, Limits(100, 64, 2**20), ComputeLock())  # type: ignore[arg-type]
    texts = protocol.reward_tensors(["a"], ["a"])
    with pytest.raises(RuntimeError):
        infer(texts)
    with pytest.raises(ProtocolError, match="stopping"):
        infer(texts)

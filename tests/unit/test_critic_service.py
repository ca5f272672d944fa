"""Who may touch the models."""

from types import SimpleNamespace

import pytest

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.base import Service
from nemo_style_rlhf.critic_service.identity import Identity
from nemo_style_rlhf.critic_service.protocol import ProtocolError


def test_after_a_fault_nothing_more_is_computed() -> None:
    """The process ends a second later; meanwhile a repeated train step would apply its first mini-batches twice."""

    class Broken:
        text = SimpleNamespace(token_ids=lambda prompt, response, rendered: [1, 2])

        def score(self, request: object) -> None:
            raise RuntimeError("out of memory")

    service = Service(Identity("m", "c", "t", 100, 64, {}), Broken(), max_request_bytes=2**20)  # type: ignore[arg-type]
    texts = protocol.reward_tensors(["a"], ["a"])
    with pytest.raises(RuntimeError):
        service.handle(protocol.REWARD_INFER.name, texts)
    with pytest.raises(ProtocolError, match="stopping"):
        service.handle(protocol.REWARD_INFER.name, texts)

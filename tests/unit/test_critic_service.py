"""Who may touch the models."""

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.base import Service
from nemo_style_rlhf.critic_service.identity import Identity
from nemo_style_rlhf.critic_service.protocol import ProtocolError
from nemo_style_rlhf.critic_service.reward_model import Score
from nemo_style_rlhf.critic_service.worker_group import WorkerGroup


def test_after_a_fault_nothing_more_is_computed() -> None:
    """The process ends a second later; meanwhile a repeated train step would apply its first mini-batches twice."""

    def broken(_: Score) -> NoReturn:
        raise RuntimeError("out of memory")

    group = WorkerGroup()
    group.join({Score: broken})
    reward: Any = SimpleNamespace(text=SimpleNamespace(token_ids=lambda prompt, response, rendered: [1, 2]))
    service = Service(Identity("m", "c", "t", 100, 64, {}), reward, group, max_request_bytes=2**20)
    texts = protocol.reward_tensors(["a"], ["a"])
    with pytest.raises(RuntimeError):
        service.handle(protocol.REWARD_INFER.name, texts)
    with pytest.raises(ProtocolError, match="stopping"):
        service.handle(protocol.REWARD_INFER.name, texts)

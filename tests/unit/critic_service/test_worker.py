"""The order in which a worker gives its memory away."""

from types import SimpleNamespace

import pytest
import torch

from nemo_style_rlhf.critic_service import worker
from nemo_style_rlhf.critic_service.worker import CriticWorker, Sleep


@pytest.mark.parametrize("has_critic", [True, False])
def test_memory_is_given_back_after_everything_is_asleep(has_critic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward model that went last kept its 14 GiB of 7 G parameters on the card, since torch keeps what it frees."""
    order: list[str] = []

    def note(what: str) -> object:
        return lambda *_: order.append(what) or 7

    monkeypatch.setattr(worker, "give_back", note("give back"))
    monkeypatch.setattr(worker, "held_bytes", note("count"))
    everything = SimpleNamespace(
        has_critic=has_critic, reward=SimpleNamespace(sleep=note("reward model")), engine=SimpleNamespace(offload=note("critic")),
        batches=SimpleNamespace(device=torch.device("cuda")),
    )  # fmt: skip
    assert CriticWorker._sleep(everything, Sleep()) == 7
    assert order == ["reward model", *(["critic"] if has_critic else []), "give back", "count"]

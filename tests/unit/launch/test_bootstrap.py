"""Which device a process computes on."""

import logging

import pytest
import torch

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch import bootstrap


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, as far as torch's answers go."""
    for name, answer in (("is_available", True), ("device_count", 2), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


def test_a_rank_takes_the_gpu_of_its_number(gpus: None, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert bootstrap._device("auto") == torch.device("cuda", 1)
    assert not caplog.text


def test_more_ranks_than_gpus_are_refused(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="LOCAL_RANK=2 but this process sees 2 GPUs: start at most 2 ranks"):
        bootstrap._device("cuda")


def test_idle_gpus_are_named(gpus: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with caplog.at_level(logging.WARNING):
        bootstrap._device("auto")
    assert "these 1 ranks use one each of this node's 2 GPUs" in caplog.text

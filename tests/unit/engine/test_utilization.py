"""GPUs' utilization by node. A device is only named here: its values come from the test."""

import logging
import time

import pytest
import torch

from nemo_style_rlhf.engine import utilization
from nemo_style_rlhf.engine.utilization import GpuUtilization, by_node

CUDA = torch.device("cuda", 0)


def wait_for(found):
    while not (value := found()):
        time.sleep(0.01)
    return value


def test_a_value_is_the_mean_since_the_last_and_none_on_a_cpu(monkeypatch):
    monkeypatch.setattr(utilization, "PERIOD_S", 0.0)
    values = iter([20.0, 60.0])
    watched = GpuUtilization(CUDA, read=lambda device: next(values))
    wait_for(lambda: len(watched._values) == 2)
    node, mean = watched.take()
    assert node and mean == 40.0
    assert watched.take() is None
    assert GpuUtilization(torch.device("cpu")).take() is None


def test_a_device_that_says_nothing_is_a_warning(caplog):
    def refuse(device):
        raise RuntimeError("Driver Not Loaded")

    with caplog.at_level(logging.WARNING):
        watched = GpuUtilization(CUDA, read=refuse)
        wait_for(lambda: caplog.records)
    assert "no gpu/utilization in the metrics: Driver Not Loaded" in caplog.text and watched.take() is None


def test_each_node_has_the_mean_of_its_ranks():
    assert by_node([("a", 20.0), ("b", 90.0), ("a", 40.0), None]) == {
        "gpu/utilization/a": pytest.approx(30.0), "gpu/utilization/b": 90.0,
    }  # fmt: skip

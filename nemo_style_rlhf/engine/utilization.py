"""Utilization of the GPUs according to NVML: sampled during training, averaged by step and node."""

import logging
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

PERIOD_S = 1.0
log = logging.getLogger(__name__)


class GpuUtilization:
    """The utilization of a rank's device: the percentage of the time in which a kernel of any process ran on it."""

    def __init__(self, device: torch.device, *, read: Callable[[torch.device], float] = torch.cuda.utilization) -> None:
        self._device, self._read = device, read
        self._lock = threading.Lock()
        self._values: list[float] = []
        if device.type == "cuda":
            threading.Thread(target=self._sample, name="gpu-utilization", daemon=True).start()

    def _sample(self) -> None:
        while True:
            try:
                value = float(self._read(self._device))
            except Exception as error:  # noqa: BLE001 NVML has many; training continues without this metric
                log.warning("no gpu/utilization in the metrics: %s", error)
                return
            with self._lock:
                self._values.append(value)
            time.sleep(PERIOD_S)

    def take(self) -> tuple[str, float] | None:
        """The node's name, and the mean since the last call in percent; None without a GPU, or without a value."""
        with self._lock:
            values, self._values = self._values, []
        return (socket.gethostname(), sum(values) / len(values)) if values else None


def by_node(taken: Iterable[tuple[str, float] | None]) -> dict[str, float]:
    """``gpu/utilization/<node>``: the mean in percent over the ranks of each node."""
    values: dict[str, list[float]] = defaultdict(list)
    for each in taken:
        if each is not None:
            values[each[0]].append(each[1])
    return {f"gpu/utilization/{node}": sum(there) / len(there) for node, there in values.items()}

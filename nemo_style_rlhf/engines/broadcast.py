"""Sends a version of the weights to all engines of a trainer at once."""

import logging
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from nemo_style_rlhf.engines.client import EngineProcess
from nemo_style_rlhf.engines.groups import PREFIX, Groups
from nemo_style_rlhf.generation.weight_store import PublishedWeights

log = logging.getLogger(__name__)


class Broadcast:
    """The trainer's side of a :class:`Group`. The group is kept as long as the engines stay the same."""

    def __init__(self, folder: Path, backend: str) -> None:
        """``folder`` holds the ready files of the engines."""
        self.reached = 0
        """Number of engines that received the last version."""
        self._folder, self._backend = folder, backend
        self._groups, self._name = Groups(folder), ""
        self._members: list[dict[str, Any]] = []
        """Ready files of the engines in the group."""
        self._failed: list[dict[str, Any]] = []
        """Ready files of engines whose group failed; that group is not tried again."""

    def send(
        self, engines: Sequence[EngineProcess], published: PublishedWeights, *, lease: str, shapes: dict[str, tuple[int, ...]],
        pool: ThreadPoolExecutor,
    ) -> None:  # fmt: skip
        """Send a version. An engine that does not get it in this way receives it when it loads."""
        members, size, self.reached = [engine.where for engine in engines], len(engines) + 1, 0
        if members == self._failed:
            return
        if members != self._members:
            self.close()
            self._members, self._name = members, PREFIX + secrets.token_hex(8)
        name = self._name

        def receive(rank: int, engine: EngineProcess) -> None:
            engine.client.acquire(lease, shapes)
            engine.client.receive(lease, published, group=name, rank=rank, size=size, backend=self._backend)

        calls = [pool.submit(engine.call, partial(receive, rank, engine)) for rank, engine in enumerate(engines, 1)]
        try:
            group = self._groups.meet(name, 0, size, self._backend)
            for path in published.files:
                group.send(path)
        except RuntimeError as error:
            log.warning("the weights were not sent to all engines at once: %s", error)
        self.reached = sum(call.exception() is None for call in calls)
        if self.reached < len(engines):
            log.warning("until an engine joins or is lost, each of these is sent its weights by itself")
            self.close()
            self._failed = members

    def close(self) -> None:
        """Leave the group."""
        self._groups.forget()
        self._members = []
        for meeting in self._folder.glob(f"{PREFIX}*"):
            meeting.unlink(missing_ok=True)

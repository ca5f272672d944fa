"""DeepSpeed's checkpoint files, serialised in memory: training can go on while they are written."""

import io
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine  # type: ignore[import-untyped]

FOLDER = Path("snapshot")


class Snapshot:
    """What one rank writes of a checkpoint."""

    def __init__(self) -> None:
        self.files: dict[Path, io.BytesIO] = {}

    def write(self, directory: Path) -> None:
        for path, content in self.files.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.getbuffer())


class InMemory(TorchCheckpointEngine):  # type: ignore[misc]
    """Takes the place of DeepSpeed's own writer, and fills a snapshot; loading is as it was."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._snapshot = Snapshot()

    def taken(self) -> Snapshot:
        """What was saved since the last call."""
        taken, self._snapshot = self._snapshot, Snapshot()
        return taken

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        content = io.BytesIO()
        super().save(state_dict, content)
        self._snapshot.files[Path(path).relative_to(FOLDER)] = content

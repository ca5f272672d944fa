"""Decodes and writes `rollouts/step_XXXXXX.jsonl` in a process beside training. Imports no torch, so that it starts fast."""

import json
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from nemo_style_rlhf.checkpoint.files import storage_errors
from nemo_style_rlhf.launch.children import end_with_parent

_to_text: Any = None
"""Turns token ids into text; only in the writing process."""


class RolloutWriter:
    """Writes the samples of one step at a time."""

    def __init__(self, folder: Path, load_decoder: Callable[[], Callable[[list[int]], str]]) -> None:
        """
        Args:
            load_decoder: called in the writing process; must be picklable.
        """
        self._folder = folder
        # Spawn, since this process has threads, and maybe a CUDA context, which do not survive a fork.
        self._process = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_prepare, initargs=(load_decoder,)
        )
        self.writing: Future[None] | None = None
        """Write of the last step's samples; None once it is known to be done."""

    def write(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Start to write ``columns`` of a step's samples: ``response`` holds token ids, the others plain JSON values.

        Raises:
            StorageError: the disk refused the samples of the previous step.
        """
        self.flush()
        self.writing = self._process.submit(_write, self._folder / f"step_{step:06d}.jsonl", dict(columns))

    def flush(self) -> None:
        """Wait until everything is written."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        self._process.shutdown()


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _prepare(load_decoder: Callable[[], Callable[[list[int]], str]]) -> None:
    global _to_text
    end_with_parent()
    _to_text = load_decoder()


def _write(path: Path, columns: dict[str, Sequence[Any]]) -> None:
    columns["response"] = [_to_text(tokens.tolist()) for tokens in columns["response"]]
    write_jsonl(path, [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])

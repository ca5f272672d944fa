"""Decodes and writes the samples of a run in a process alongside training. Imports no torch, so that it starts fast."""

import logging
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_style_rlhf.checkpoint.files import storage_errors, write_atomically
from nemo_style_rlhf.processes.child import end_with_parent
from nemo_style_rlhf.schema.tracking import RolloutsConfig

if TYPE_CHECKING:
    from nemo_style_rlhf.tracking.rollout_files import StepSamples

log = logging.getLogger(__name__)
Work = Future[list[str]]
"""A job of the writing process; it returns warnings."""
NICENESS = 10
"""Niceness of the writing process: training has priority where cores are scarce."""
_to_text: Any = None
"""Turns token ids into text; only in the writing process."""


class RolloutWriter:
    """Writes the samples of one step at a time."""

    def __init__(
        self, folder: Path, config: RolloutsConfig, load_decoder: Callable[[], Callable[[list[int]], str]],
        tokenizer: str | None,
    ) -> None:  # fmt: skip
        """Start the writing process.

        Args:
            load_decoder: called in the writing process; must be picklable.
            tokenizer: in the format of the `tokenizers` library, if it has one.
        """
        self._folder = folder
        self._config = config
        self._load_decoder = load_decoder
        self._process = self._start()
        self._tokenizer = tokenizer
        self._compacting: Work | None = None
        self.writing: Work | None = None
        """Write of the last recorded step's samples, for :meth:`finish`; None once it is known to be done."""

    def _start(self) -> ProcessPoolExecutor:
        # Spawn: this process has threads, and maybe a CUDA context. They do not survive a fork.
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, spawn, initializer=_prepare, initargs=(self._load_decoder,))

    def rewind(self, step: int) -> None:
        """Remove the samples of steps after ``step``: these will be repeated.

        Raises:
            StorageError: the disk refused.
        """
        self.flush()
        if self._config.every or self._folder.is_dir():  # an earlier start may have recorded
            self.finish(self._submit(_begin, self._folder, step, self._tokenizer))

    def write(self, samples: "StepSamples") -> None:
        """Start to write a step's samples, and then to merge older ones. No checkpoint waits for the merge.

        Raises:
            StorageError: the disk refused the samples of an earlier step.
        """
        if self.writing is not None:
            self.finish(self.writing)
        self.writing = self._submit(_write, self._folder, samples)
        if self._compacting is None or self._compacting.done():
            if self._compacting is not None:
                self.finish(self._compacting)
            self._compacting = self._submit(_compact, self._folder, self._config.keep)

    def flush(self) -> None:
        """Wait until everything is written and merged."""
        begun = [work for work in (self.writing, self._compacting) if work is not None]
        self.writing = self._compacting = None
        for work in begun:
            self.finish(work)

    def finish(self, work: Work) -> None:
        """Wait for ``work``, and log its failure once: failed recording does not end training.

        Raises:
            StorageError: the disk refused.
        """
        try:
            warnings = work.result()
        except BrokenProcessPool:
            log.warning("the process that records samples has died; the samples that it had are not recorded")
            return
        while warnings:
            log.warning("%s", warnings.pop(0))

    def close(self) -> None:
        self._process.shutdown()

    def _submit(self, do: Callable[..., list[str]], *arguments: Any) -> Work:
        try:
            return self._process.submit(do, *arguments)
        except BrokenProcessPool:
            self._process = self._start()
            return self._process.submit(do, *arguments)


def _prepare(load_decoder: Callable[[], Callable[[list[int]], str]]) -> None:
    global _to_text
    end_with_parent()
    os.nice(NICENESS)
    _to_text = load_decoder()


def _begin(folder: Path, step: int, tokenizer: str | None) -> list[str]:
    from nemo_style_rlhf.tracking.rollout_files import TOKENIZER_FILE, rewind

    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if tokenizer is not None:
            write_atomically(folder / TOKENIZER_FILE, tokenizer.encode())
        return rewind(folder, step)


def _write(folder: Path, samples: "StepSamples") -> list[str]:
    from nemo_style_rlhf.tracking.rollout_files import write_step

    try:
        write_step(folder, samples, [_to_text(ids) for ids in samples.responses()])
    except ValueError as error:  # what Arrow cannot hold, such as half of a surrogate pair in a prompt
        return [f"the samples of step {samples.step} are not recorded ({' '.join(str(error).split())[:200]})"]
    return []


def _compact(folder: Path, keep: int) -> list[str]:
    from nemo_style_rlhf.tracking.rollout_files import compact

    return compact(folder, keep)

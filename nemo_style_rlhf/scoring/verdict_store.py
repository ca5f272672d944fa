"""A judge's answers on disk, each asked for once by all processes that share the folder."""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock
from filelock import Timeout as FileLockTimeout

from nemo_style_rlhf.errors import StorageError, UserError

POLL_S = 0.05
"""Seconds between looks at a lock that another process holds."""


@dataclass(frozen=True)
class JudgesAnswer:
    text: str
    finish_reason: str | None
    """``stop``, ``length`` (cut at max_tokens), or the endpoint's own word."""


class VerdictStore:
    """One file for each answer, readable only by this user."""

    def __init__(self, folder: Path) -> None:
        """Make ``folder``; raises StorageError if the disk refuses."""
        self._folder = folder
        self._in_folder(lambda: folder.mkdir(mode=0o700, parents=True, exist_ok=True))

    def once(self, key: str, ask: Callable[[], JudgesAnswer], closing: Callable[[], bool]) -> JudgesAnswer:
        """The answer stored under ``key``, or else the answer of ``ask``. Only one process at a time calls ``ask``.

        Args:
            closing: whether to give up waiting for another process.

        Raises:
            Exception: what ``ask`` raises; the next caller asks again.
            filelock.Timeout: ``closing`` became true.
            StorageError: the disk refused, or the stored answer may not be read.
            UserError: the stored answer is damaged.
        """
        path = self._folder / key[:2] / f"{key}.json"
        if (known := _read(path)) is not None:
            return known
        self._in_folder(lambda: path.parent.mkdir(mode=0o700, exist_ok=True))
        lock = FileLock(path.with_suffix(".lock"), mode=0o600, thread_local=False)
        self._in_folder(lambda: lock.acquire(poll_interval=POLL_S, cancel_check=closing))
        try:
            if (known := _read(path)) is None:
                known = ask()
                self._in_folder(lambda: _write(path, known))
            Path(lock.lock_file).unlink(missing_ok=True)  # a process that waits for it finds the answer
        finally:
            lock.release()
        return known

    def _in_folder(self, work: Callable[[], object]) -> None:
        try:
            work()
        except FileLockTimeout:
            raise
        except OSError as error:
            raise StorageError(
                f"the judge's verdicts cannot be written to {self._folder} ({error.strerror}): make room, or set "
                "reward.judge.cache_dir to another folder"
            ) from error


def _read(path: Path) -> JudgesAnswer | None:
    try:
        return JudgesAnswer(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(
            f"{path}, a judge's verdict, cannot be read ({error.strerror}): change its permissions, or set "
            "reward.judge.cache_dir to another folder"
        ) from error
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path}, a judge's verdict, is damaged: delete it, and the judge will be asked again"
        ) from error


def _write(path: Path, answer: JudgesAnswer) -> None:
    """Write under another name first, so that there is a whole file or none. ``mkstemp`` makes files of mode 0600."""
    descriptor, beside = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(answer), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise

"""Shows the programs of a launcher: lines worth reading from their logs, above one line of progress."""

import re
import time
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.text import Text

PERIOD_S = 10.0
"""Seconds between two lines of progress where no terminal can replace the last one."""
WORTH_READING = re.compile(
    r"[\d:]{8} (WARNING|ERROR|CRITICAL) (?!.*; attempt \d+ in )"
    r"|[\d:]{8} INFO .*(resumed from|exported the|checkpoints go to |dry run|Ctrl-C again)|done: "
)
"""Begins a line of interest. An attempt to reach a server that died is not one; its last failure is."""


class Screen:
    """Writes to stderr. The progress stays on the last line of a terminal; elsewhere it is a line now and then."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._unsaid = ""
        self._said_at = -PERIOD_S

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def progress(self, text: str) -> None:
        if self._console.is_terminal:
            if self._status is None:
                self._status = self._console.status("")
                self._status.start()
            self._status.update(Text(text, no_wrap=True))
            return
        self._unsaid = text
        if time.monotonic() - self._said_at > PERIOD_S:
            self._say_progress()

    def close(self) -> None:
        """End the line of progress; call only :meth:`say` from here on."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        self._say_progress()

    def _say_progress(self) -> None:
        if self._unsaid:
            self.say(self._unsaid)
            self._unsaid, self._said_at = "", time.monotonic()


class GrowingLog:
    """The lines that are added to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0

    def news(self) -> list[str]:
        """The lines that were completed since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            whole = file.read().rpartition(b"\n")[0]
        self._at += len(whole) + bool(whole)
        return whole.decode(errors="replace").splitlines()

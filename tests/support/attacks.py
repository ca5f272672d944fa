"""Files that somebody else made."""

from pathlib import Path


class Attack:
    """Runs code when it is unpickled: leaves a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple:
        return Path.touch, (self._marker,)

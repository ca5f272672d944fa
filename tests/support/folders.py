"""Folders that another user looks into, and files that nobody can read."""

import tempfile
from pathlib import Path


def let_others_read(folder: Path) -> None:
    """Open ``folder`` to every user, and those above it as far as pytest has made them."""
    temporary = Path(tempfile.gettempdir())
    for each in (folder, *folder.parents):
        if each.is_relative_to(temporary) and each != temporary:
            each.chmod(0o755)


def make_unreadable(path: Path) -> None:
    """Replace a file by one that the kernel refuses to read: the first byte raises an input/output error."""
    path.unlink()
    path.symlink_to("/proc/self/mem")

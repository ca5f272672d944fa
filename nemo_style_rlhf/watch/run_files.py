"""Reads files of runs, which others write: regular ones within the run's folder, and no more of them than a page can use.

A pipe would block its reader, a link may lead to files that its maker cannot read, and a large file takes the page's memory.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def opened(path: Path, within: Path) -> Iterator[int]:
    """A descriptor of the regular file at ``path``, for reading.

    Raises:
        OSError: it is not there, is not a regular file, or lies outside of the folder ``within``.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if not path.resolve().is_relative_to(within.resolve()):
            raise OSError(errno.EXDEV, "it is a link out of the run's folder")
        yield file
    finally:
        os.close(file)


def read(path: Path, within: Path, *, most: int) -> bytes:
    """The content of a file as :func:`opened` finds it.

    Raises:
        OSError: as there; or it has more than ``most`` bytes.
    """
    with opened(path, within) as file:
        if (size := os.fstat(file).st_size) > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than {most}")
        content = b""
        while part := os.read(file, most + 1 - len(content)):
            content += part
    return content

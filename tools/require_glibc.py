"""Refuses a host whose C library is too old for PyTriton's wheel: pip would say that no wheel exists.

python3 tools/require_glibc.py
"""

import platform
import sys

NEEDED = (2, 35)


def refusal(found: str) -> str | None:
    """The refusal of a host with this version of glibc; None if it is new enough, or unknown."""
    parts = found.split(".")[:2]
    if not all(map(str.isdigit, parts)) or tuple(map(int, parts)) >= NEEDED:
        return None
    return (
        f"error: the server's PyTriton needs glibc {NEEDED[0]}.{NEEDED[1]} or newer (Ubuntu 22.04, Debian 12, RHEL 10), this "
        f"host has {found}: use a newer system, or a container with one"
    )


if __name__ == "__main__":
    sys.exit(refusal(platform.libc_ver()[1]))

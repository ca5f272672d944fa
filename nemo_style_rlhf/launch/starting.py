"""Shows what a program does while it starts: one short line on a terminal, replaced each time, or a line in the log for the
launcher to show with all of its programs. Standard library only."""

import logging
import os
import sys

PART = "NSR_PART"
"""Environment variable of a program that a launcher of ours has started: its name."""
STARTING = "starting: "
"""Begins the lines in the log that the launcher reads."""
CLEAR = "\x1b[2K"
"""Terminal code that clears the line."""
log = logging.getLogger(__name__)


def starting(what: str) -> None:
    """Say ``what`` the program does next, such as "loading vLLM"; the next output on a terminal takes its place."""
    if PART in os.environ:
        log.info("%s%s", STARTING, what)
    elif sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print(f"{CLEAR}{what} ...", end="\r", file=sys.stderr, flush=True)


def clear() -> None:
    """Clear the line on a terminal, before output that may be shorter."""
    if sys.stderr.isatty():
        print(CLEAR, end="\r", file=sys.stderr, flush=True)

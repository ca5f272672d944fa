"""Common code of our child processes. It imports no torch, so that they start fast."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Called in a child process: makes it end with its parent, since a killed parent cannot stop it."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

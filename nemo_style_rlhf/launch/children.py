"""What child processes of ours have in common. Imports no torch, so that they start fast."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Called in a child: from now on it ends when its parent does. A killed parent cannot stop what runs for ever."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

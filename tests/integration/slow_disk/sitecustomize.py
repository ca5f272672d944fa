"""On PYTHONPATH: a disk that takes a while for every flush, as long as the file that SLOW_DISK names exists."""

import os
import time

FLUSH_S = 0.3
flush = os.fsync


def slow_flush(descriptor: int) -> None:
    if os.path.exists(os.environ.get("SLOW_DISK", "")):
        time.sleep(FLUSH_S)
    flush(descriptor)


os.fsync = slow_flush

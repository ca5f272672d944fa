"""On PYTHONPATH: a disk that takes SLOW_DISK_S for every flush, as long as the file that SLOW_DISK names exists."""

import os
import time

flush = os.fsync


def slow_flush(descriptor: int) -> None:
    if os.path.exists(os.environ.get("SLOW_DISK", "")):
        time.sleep(float(os.environ.get("SLOW_DISK_S", "0.3")))
    flush(descriptor)


os.fsync = slow_flush

"""glibc's malloc, told to keep what a training step frees, and to keep it whole: the next step needs it again."""

import ctypes
import os
import sys
from itertools import dropwhile

# From malloc.h; Python's ctypes cannot read macros.
M_MXFAST = 1
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
NEVER = 2**31 - 1
TUNABLES = "GLIBC_TUNABLES"
THREAD_CACHES_OFF = "glibc.malloc.tcache_count=0"


def keep_freed_memory() -> None:
    """Reuse freed tensors instead of giving their pages back to the kernel, which fills every page with zeros again.

    By default every activation above 32 MiB is a mapping of its own, and what is freed at the top of the heap is returned
    at once: a quarter of a forward pass on CPU was page faults. The price is that memory stays at its peak. One arena,
    because the heaps of further threads are returned whatever the thresholds say. Small blocks join their free neighbours
    at once, see :func:`without_thread_caches`. Does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MXFAST, 0)
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, NEVER)
        mallopt(M_TRIM_THRESHOLD, NEVER)


def return_freed_memory() -> None:
    """Give large blocks back to the kernel once they are freed: for a process that waits most of the time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, 2**20)
        mallopt(M_TRIM_THRESHOLD, 2**23)


def trim() -> None:
    """Give the kernel back what is free now, wherever in the heap, whatever :func:`keep_freed_memory` says. Rare calls only."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def without_thread_caches() -> None:
    """Start a program on the CPU anew, as the same process, with glibc's caches of small blocks per thread off.

    torch asks for aligned blocks; glibc cuts them out of blocks that are 96 bytes larger. Cuttings that go to a cache never join
    the large block again once it is freed, and then it is too small for the next of its size: heaps were two to three times
    what is in use (docs/benchmarks.md). Only the environment can turn the caches off, and only before a program starts. Does
    nothing where the environment already says something about them, or where Python was not started to run this program alone.
    """
    given = os.environ.get(TUNABLES, "")
    words = list(dropwhile(lambda word: word.startswith("-"), sys.orig_argv[1:]))
    alone = words[:1] == sys.argv[:1] and "torch" not in sys.modules  # no debugger's, no test's
    if sys.platform == "linux" and alone and "tcache_count" not in given:
        os.environ[TUNABLES] = f"{given}:{THREAD_CACHES_OFF}" if given else THREAD_CACHES_OFF
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

"""Makes glibc's malloc keep the memory that a training step frees, unfragmented: the next step needs it again."""

import ctypes
import os
import sys
from mmap import MADV_DONTNEED, PAGESIZE

from nemo_style_rlhf.launch.interpreter import started_for_this

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

    By default every activation above 32 MiB is a separate mapping, and memory freed at the top of the heap is returned at
    once: page faults took a quarter of a forward pass on CPU. The price is that memory stays at its peak. All threads use one
    arena, because glibc returns the heaps of other arenas whatever the thresholds say. Small blocks join their free neighbors
    at once, see :func:`prepare_heap`. Does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MXFAST, 0)
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, NEVER)
        mallopt(M_TRIM_THRESHOLD, NEVER)


def return_freed_memory() -> None:
    """Return large blocks to the kernel once they are freed, in a process that waits most of the time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, 2**20)
        mallopt(M_TRIM_THRESHOLD, 2**23)


def trim() -> None:
    """Return all free memory of the heap to the kernel, in spite of :func:`keep_freed_memory`. Call this rarely."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def forget(address: int, size: int) -> None:
    """Return the whole pages among ``size`` bytes to the kernel; the memory stays allocated and reads as zeros."""
    first, end = -(-address // PAGESIZE) * PAGESIZE, (address + size) // PAGESIZE * PAGESIZE
    if first < end and ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_DONTNEED):
        raise OSError("madvise failed")


def prepare_heap() -> None:
    """Set what must be set before libraries are imported: one arena for all threads, and no caches of small blocks per thread.

    NumPy's BLAS starts threads as it is imported, and the arena that they make serves later threads, too; :func:`trim` cannot
    return the memory at its top. Only the environment can turn the caches off, so this restarts the program, as the same process:
    torch asks for aligned blocks; glibc cuts them out of blocks that are 96 bytes larger. Remainders in a cache do not rejoin the
    large block once it is freed, so that it is too small for the next request of its size: heaps were two to three times as large
    as the memory in use (docs/benchmarks.md). It does not restart if the environment already sets the caches, or if Python was
    not started to run only this program.
    """
    given = os.environ.get(TUNABLES, "")
    alone = started_for_this() and "torch" not in sys.modules
    if sys.platform == "linux" and alone and "tcache_count" not in given:
        os.environ[TUNABLES] = f"{given}:{THREAD_CACHES_OFF}" if given else THREAD_CACHES_OFF
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)

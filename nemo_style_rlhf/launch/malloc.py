"""glibc's malloc, told to keep what a training step frees: the next step needs it again."""

import ctypes

# From malloc.h; Python's ctypes cannot read macros.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Reuse freed tensors instead of giving their pages back to the kernel, which fills every page with zeros again.

    By default every activation above 32 MiB is a mapping of its own, and what is freed at the top of the heap is returned
    at once: a quarter of a forward pass on CPU was page faults. The price is that memory stays at its peak. One arena,
    because the heaps of further threads are returned whatever the thresholds say. Does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, NEVER)
        mallopt(M_TRIM_THRESHOLD, NEVER)

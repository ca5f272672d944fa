"""Page faults of freed and reallocated tensors, counted by the kernel in a process of their own."""

import subprocess
import sys

import pytest

REALLOCATE = """
import resource, threading, torch
from nemo_style_rlhf.launch.malloc import keep_freed_memory
if {keep}:
    keep_freed_memory()

def rounds(count):
    for _ in range(count):
        tensors = [torch.ones(10 * 2**20) for _ in range(2)]  # 2 x 40 MiB, 10,240 pages each

def measure():
    rounds(32)  # until the heap has its final shape
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    rounds(8)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=measure)  # the critic server computes in threads
thread.start()
thread.join()
"""


def page_faults(keep: bool) -> int:
    code = REALLOCATE.format(keep=keep)
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has mallopt")
def test_freed_tensors_are_reused_without_page_faults() -> None:
    """Fresh mappings fault on every page of every round, kept memory on hardly any; how many is the kernel's page size."""
    assert page_faults(keep=True) < page_faults(keep=False) / 2

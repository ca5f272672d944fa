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
    rounds(8)  # until the heap has its final shape
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    rounds(4)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=measure)  # the critic server computes in threads
thread.start()
thread.join()
"""


def page_faults(keep: bool) -> int:
    code = REALLOCATE.format(keep=keep)
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has mallopt")
def test_freed_tensors_are_reused_without_page_faults() -> None:
    """Fresh mappings fault on every page of every round, kept memory on hardly any; how many is the kernel's page size."""
    assert page_faults(keep=True) < page_faults(keep=False) / 2


FRAGMENT = """
import ctypes, os, sys
from nemo_style_rlhf.launch.malloc import keep_freed_memory, prepare_heap
if sys.argv[1] == "True":
    prepare_heap()
import torch
keep_freed_memory()
torch.set_num_threads(1)  # several take turns as they like

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
layers = torch.nn.ModuleList(
    torch.nn.Sequential(torch.nn.Linear(128, 640), torch.nn.SiLU(), torch.nn.LayerNorm(640), torch.nn.Linear(640, 128))
    for _ in range(24)
)
before = libc.mallinfo2().arena
for _ in range(2):
    x = torch.randn(1024, 128)
    for layer in layers:
        x = x + torch.utils.checkpoint.checkpoint(layer, torch.nn.functional.layer_norm(x, (128,)), use_reentrant=False)
    x.square().mean().backward()
print((libc.mallinfo2().arena - before) // 2**20)
"""


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has these caches")
def test_without_thread_caches_freed_tensors_are_found_again(tmp_path) -> None:
    script = tmp_path / "fragment.py"
    script.write_text(FRAGMENT)

    def grown(off: bool) -> int:
        command = [sys.executable, str(script), str(off)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert grown(True) < grown(False) / 2


TRIM = """
import re, sys, threading
from pathlib import Path
from nemo_style_rlhf.launch.malloc import keep_freed_memory, prepare_heap, trim
if sys.argv[1] == "True":
    prepare_heap()

def start(work, count):
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

held = threading.Barrier(4)
start(held.wait, 4)  # as NumPy's BLAS does when it is imported: each thread has an arena, while other threads have theirs
keep_freed_memory()

def mib():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

def stage():
    body = bytearray(b"1") * (16 * 2**20)
    held.wait()

before = mib()
start(stage, 4)
trim()
print(mib() - before)
"""


@pytest.mark.slow("starts Python twice")
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has arenas")
def test_what_threads_freed_is_returned_whatever_ran_before(tmp_path) -> None:
    script = tmp_path / "trim.py"
    script.write_text(TRIM)

    def kept(prepared: bool) -> int:
        command = [sys.executable, str(script), str(prepared)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert kept(True) < 4
    assert kept(False) > 12

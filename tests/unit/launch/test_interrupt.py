"""Ctrl-C and the processes that multiprocessing has started. Everything else about Ctrl-C needs real runs: tests/integration."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_style_rlhf.launch.interrupt import INTERRUPTED_EXIT
from tests.unit.agents.episodes import alive, wait_until

STARTS_CHILDREN = """
import multiprocessing, sys, threading, time
from nemo_style_rlhf.launch import interrupt

def spin():
    while True:
        pass

if __name__ == "__main__":
    interrupt.listen()
    interrupt.keep_from_children()
    sys.setswitchinterval(0.1)  # for so long another thread runs between a child's start and the message that it waits for
    threading.Thread(target=spin, daemon=True).start()
    print("starting", flush=True)
    while True:
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,)).start()
"""


@pytest.mark.slow("starts processes")
def test_a_child_that_is_being_started_says_nothing(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTS_CHILDREN)
    for moment in range(5):
        with subprocess.Popen(
            [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == "starting\n"
            time.sleep(0.1 + 0.07 * moment)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=120)  # its children have ended, too: they hold the pipe
        assert process.returncode == INTERRUPTED_EXIT
        assert said == "\nstopped; the same command starts again\n"


HAS_GRANDCHILDREN = """
import multiprocessing, subprocess, sys, time
from nemo_style_rlhf.launch import interrupt

def work():
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    interrupt.listen()
    interrupt.keep_from_children()
    multiprocessing.get_context("spawn").Process(target=work).start()
    time.sleep(600)
"""


def test_what_children_have_started_ends_too(tmp_path: Path) -> None:
    """A reward function's process may have started others, which block SIGINT as it does."""
    script = tmp_path / "script.py"
    script.write_text(HAS_GRANDCHILDREN)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        try:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == INTERRUPTED_EXIT
            assert wait_until(lambda: not alive(grandchild))
        finally:
            process.kill()
            if alive(grandchild):
                os.kill(grandchild, signal.SIGKILL)


HAS_A_FOLDER = """
import os, signal, sys, threading
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started the tests may ignore it
from pathlib import Path
from nemo_style_rlhf.launch import interrupt

interrupt.remove_at_end(Path(sys.argv[1]))
child = os.fork()
if not child:
    threading.Event().wait()
print(child, flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_can_be_caught_leaves_no_folder_in_memory(number: int, tmp_path: Path) -> None:
    """Whatever the main thread does; a forked child ends by itself."""
    folder = tmp_path / "weights"
    folder.mkdir()
    command = [sys.executable, "-c", HAS_A_FOLDER, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            os.kill(child, number)
            assert wait_until(lambda: not alive(child))
            assert process.poll() is None and folder.exists()
            process.send_signal(number)
            assert process.wait(60) == 128 + number and not folder.exists()
        finally:
            process.kill()

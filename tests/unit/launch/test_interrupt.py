"""Ctrl-C while a child process is being started. Everything else about Ctrl-C needs real runs: tests/integration."""

import signal
import subprocess
import sys
import time

from nemo_style_rlhf.launch.interrupt import INTERRUPTED_EXIT

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

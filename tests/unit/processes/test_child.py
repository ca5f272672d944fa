"""Child processes end with all that they started, whoever kills whom."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nemo_style_rlhf.processes.child import ChildProcess
from tests.support.paths import ROOT
from tests.support.processes import is_alive, soon

ESCAPES = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["setsid", sys.executable, "-c", '''
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    pathlib.Path(sys.argv[1] + ".new").write_text(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(600)
''', sys.argv[1]])
"""
"""Leaves a process in a session of its own, whose parent has ended and which ignores SIGTERM."""


def python(code: str, *words: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, words)]


def escaped(note: Path) -> int:
    assert soon(note.exists)
    return int(note.read_text())


@pytest.mark.parametrize("code", [0, 3, -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV])
def test_the_exit_code_is_the_programs(code: int) -> None:
    ends = f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
    assert ChildProcess(python(ends)).wait(20) == code


def test_a_program_that_cannot_be_started_raises_as_it_would_here(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no_such_program"):
        ChildProcess([str(tmp_path / "no_such_program")])
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError):
        ChildProcess([str(tmp_path / "file")])


@pytest.mark.parametrize("how", ["ends", "is killed", "object is dropped"])
def test_nothing_of_a_program_is_left_not_even_in_another_session(how: str, tmp_path: Path) -> None:
    rest = "" if how == "ends" else "time.sleep(600)"
    child = ChildProcess(
        python(ESCAPES + f"while not os.path.exists(sys.argv[1]):\n    time.sleep(0.01)\n{rest}", tmp_path / "note")
    )
    left, pid = escaped(tmp_path / "note"), child.pid
    if how == "ends":
        assert child.wait(20) == 0
        assert not is_alive(left)
    elif how == "is killed":
        assert child.kill() == -signal.SIGKILL
        assert not is_alive(left) and not is_alive(pid)
    else:
        del child
        assert soon(lambda: not is_alive(left) and not is_alive(pid))


def test_what_a_program_has_left_may_end_by_itself(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen(['sh', '-c', f'sleep 0.5; touch {sys.argv[1]}'])"
    assert ChildProcess(python(code, tmp_path / "done"), linger_s=20).wait(20) == 0
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("grace_s", [0, 20])
@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a fork that holds the link"])
def test_a_program_ends_with_its_parent_after_a_grace_and_then_runs_what_is_to_follow(
    grace_s: int, forks: bool, tmp_path: Path
) -> None:
    saves = f"""
import pathlib, signal, sys, time
folder = pathlib.Path({str(tmp_path)!r})
def save(*_):
    time.sleep(0.3)
    (folder / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(folder / "runs").touch()
time.sleep(600)
"""
    parent = f"""
import os, sys, time
from nemo_style_rlhf.processes.child import ChildProcess
after = ["touch", {str(tmp_path / "after")!r}]
child = ChildProcess([sys.executable, "-c", {saves!r}], grace_s={grace_s}, afterwards=after)
holder = os.fork() if {forks} else 0
if {forks} and holder == 0:
    time.sleep(20)
    os._exit(0)
print(child.pid, holder, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen(python(parent), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child, holder = map(int, process.stdout.readline().split())
    assert soon((tmp_path / "runs").exists)
    process.kill()
    assert soon((tmp_path / "after").exists)
    assert not is_alive(child) and (tmp_path / "saved").exists() == (grace_s > 0)
    if holder:
        os.kill(holder, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("killed", [False, True])
def test_what_is_to_follow_does_not_follow_while_the_parent_lives(killed: bool, tmp_path: Path) -> None:
    """Also not after an order that comes when the program has ended by itself."""
    command = python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    child = ChildProcess(command, afterwards=["touch", str(tmp_path / "after")])
    if killed:
        time.sleep(0.3)
        child.send_signal(signal.SIGKILL)
    assert child.wait(20) == -signal.SIGSEGV
    assert not (tmp_path / "after").exists()


def test_what_is_to_follow_below_a_killed_program_still_follows(tmp_path: Path) -> None:
    """As a server's files go when its launcher is killed with all that it has started."""
    inner = f"""
import time
from nemo_style_rlhf.processes.child import ChildProcess
child = ChildProcess(["sleep", "600"], afterwards=["sh", "-c", "sleep 0.3; touch {tmp_path / "after"}"])
print(child.pid, flush=True)
time.sleep(600)
"""
    outer = ChildProcess(python(inner), cwd=ROOT, stdout=subprocess.PIPE)
    assert outer.stdout is not None
    program = int(outer.stdout.readline())
    assert outer.kill() == -signal.SIGKILL
    assert (tmp_path / "after").exists() and not is_alive(program)


def supervisor_of(child: ChildProcess) -> psutil.Process:
    supervisor = psutil.Process(child.pid).parent()
    assert supervisor is not None
    return supervisor


BATCH = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@pytest.mark.parametrize("code", [5, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM])
def test_a_batch_systems_signals_do_not_reach_the_supervisor(code: int) -> None:
    ends = f"os.kill(os.getpid(), {-code})" if code < 0 else f"sys.exit({code})"
    child = ChildProcess(python(f"import os, sys; sys.stdin.read(); {ends}"), stdin=subprocess.PIPE)
    for number in BATCH:
        supervisor_of(child).send_signal(number)
    time.sleep(0.1)
    assert child.poll() is None and child.stdin is not None
    child.stdin.close()
    assert child.wait(20) == code


def test_nor_do_they_keep_it_from_what_is_to_follow(tmp_path: Path) -> None:
    parent = f"""
import sys, time
from nemo_style_rlhf.processes.child import ChildProcess
child = ChildProcess(["sleep", "600"], afterwards=["touch", {str(tmp_path / "after")!r}])
print(child.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen(python(parent), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    supervisor = psutil.Process(int(process.stdout.readline())).parent()
    assert supervisor is not None
    for number in BATCH:
        supervisor.send_signal(number)
    process.kill()
    process.wait()
    assert soon((tmp_path / "after").exists)


def test_a_killed_supervisor_takes_the_program_along() -> None:
    child = ChildProcess(["sleep", "600"])
    supervisor_of(child).kill()
    assert child.wait(20) == -signal.SIGKILL
    assert soon(lambda: not is_alive(child.pid))


def test_a_program_that_stops_its_supervisor_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    stops = "while not os.path.exists(sys.argv[1]):\n    time.sleep(0.01)\n"
    stops += "os.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(600)"
    child = ChildProcess(python(ESCAPES + stops, tmp_path / "note"))
    left = escaped(tmp_path / "note")
    assert soon(lambda: supervisor_of(child).status() == psutil.STATUS_STOPPED)
    assert child.kill() == -signal.SIGKILL
    assert not is_alive(left) and not is_alive(child.pid)


FORKS = "import os\nwhile True:\n    if os.fork():\n        os._exit(0)"


def test_what_forks_without_end_is_killed() -> None:
    child = ChildProcess(python(FORKS), linger_s=600)
    time.sleep(0.2)
    assert child.kill() in (0, -signal.SIGKILL)
    time.sleep(0.1)
    assert not [each for each in psutil.process_iter(["cmdline"]) if FORKS in (each.info["cmdline"] or [])]


def test_a_program_has_the_signals_of_its_parent() -> None:
    """It blocks what its parent blocks, since a batch system signals all processes, and ignores nothing that Python ignores."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        child = ChildProcess(["cat", "/proc/self/status"], stdout=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    output, _ = child.communicate(None, 20)
    lines = [line.split() for line in output.decode().splitlines() if line.startswith(("SigBlk", "SigIgn"))]
    masks = {name: int(mask, 16) for name, mask in lines}
    assert masks["SigBlk:"] >> (signal.SIGUSR1 - 1) & 1 and not masks["SigBlk:"] >> (signal.SIGTERM - 1) & 1
    assert masks["SigIgn:"] & sum(1 << (each - 1) for each in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)) == 0


def test_a_process_with_many_open_files_starts_programs(tmp_path: Path) -> None:
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        child = ChildProcess(python(ESCAPES, tmp_path / "note"), linger_s=600)
        left = escaped(tmp_path / "note")
        assert child.kill() in (0, -signal.SIGKILL) and not is_alive(left)
    finally:
        for each in held:
            os.close(each)


def test_commands_that_the_kernel_cannot_pass_on_are_refused() -> None:
    for command in ([], ["echo", "a\0b"]):
        with pytest.raises(ValueError, match="is not a command"):
            ChildProcess(command)


OPEN = """
import os, sys
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
os.write(int(sys.argv[1]), " ".join(str(number) for number in range(1024) if is_open(number)).encode())
"""


def test_a_program_gets_its_descriptors_and_none_of_the_supervisors() -> None:
    reads, writes = os.pipe()
    child = ChildProcess(python(OPEN, writes), pass_fds=[writes])
    os.close(writes)
    with open(reads) as told:  # which ends, so the supervisor does not keep it open
        assert [*map(int, told.read().split())] == [0, 1, 2, writes]
    assert child.wait(20) == 0

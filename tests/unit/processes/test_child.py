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
from tests.support.processes import is_alive

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


def soon(condition, timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


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
after = ["/usr/bin/env", "touch", {str(tmp_path / "after")!r}]
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


def test_what_is_to_follow_does_not_follow_while_the_parent_lives(tmp_path: Path) -> None:
    child = ChildProcess(["true"], afterwards=["/usr/bin/env", "touch", str(tmp_path / "after")])
    assert child.wait(20) == 0
    assert not (tmp_path / "after").exists()


def test_a_batch_systems_signals_do_not_end_the_supervisor_and_a_killed_one_takes_the_program_along() -> None:
    child = ChildProcess(["sleep", "600"])
    supervisor = psutil.Process(child.pid).parent()
    assert supervisor is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        supervisor.send_signal(number)
    time.sleep(0.2)
    assert child.poll() is None and is_alive(child.pid)
    supervisor.kill()
    assert child.wait(20) == -signal.SIGKILL
    assert soon(lambda: not is_alive(child.pid))


def test_a_supervisor_that_its_program_stopped_is_killed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_style_rlhf.processes.child.END_S", 0.5)
    child = ChildProcess(python("import os, signal, time; os.kill(os.getppid(), signal.SIGSTOP); time.sleep(600)"))
    supervisor = psutil.Process(child.pid).parent()
    assert supervisor is not None and soon(lambda: supervisor.status() == psutil.STATUS_STOPPED)
    assert child.kill() == -signal.SIGKILL
    assert soon(lambda: not is_alive(child.pid))


OPEN = """
import os, sys
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
os.write(int(sys.argv[1]), " ".join(str(number) for number in range(64) if is_open(number)).encode())
"""


def test_a_program_gets_its_descriptors_and_none_of_the_supervisors() -> None:
    reads, writes = os.pipe()
    child = ChildProcess(python(OPEN, writes), pass_fds=[writes])
    os.close(writes)
    with open(reads) as told:  # which ends, so the supervisor does not keep it open
        assert [*map(int, told.read().split())] == [0, 1, 2, writes]
    assert child.wait(20) == 0

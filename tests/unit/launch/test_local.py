"""Programs as child processes: a failed one is named, servers are waited for, and nothing outlives its launcher."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nemo_style_rlhf.launch import local
from nemo_style_rlhf.launch.local import Child, ProgramFailed, wait_for
from nemo_style_rlhf.launch.program import ROOT, Program
from nemo_style_rlhf.launch.supervisor import Supervisor
from tests.support.processes import is_alive, soon

SLEEP = "import time; time.sleep(600)"
FAMILY = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
"""
IGNORES_SIGTERM = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
{FAMILY}
time.sleep(600)
"""
SERVER = """
import json, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("serving", flush=True)
pathlib.Path(sys.argv[1] + ".new").write_text(json.dumps({"port": 1234, "pid": os.getpid()}))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LINGER_S", 0.5)


def python(name: str, code: str, *words: object, **settings) -> Program:
    return Program(name, [sys.executable, "-c", code, *map(str, words)], **settings)


def server(tmp_path: Path, name: str = "server") -> Program:
    return python(name, SERVER, tmp_path / "ready.json", ready_file=tmp_path / "ready.json")


def written(note: Path) -> int:
    assert soon(lambda: note.exists() and note.read_text())
    return int(note.read_text())


def test_a_program_gets_its_environment_and_the_repositorys_root(tmp_path):
    code = "import os, sys; print(os.getcwd(), os.environ['A'], 'PATH' in os.environ, repr(sys.stdin.read()))"
    with Supervisor(tmp_path / "logs") as launcher:
        launcher.start(python("hello", code, env={"A": "1"}))
        launcher.wait("hello")
    assert (tmp_path / "logs" / "hello.log").read_text() == f"{ROOT} 1 True ''\n"


def test_a_failed_program_is_named_with_the_end_of_its_log(tmp_path):
    code = "print(*range(100), sep='\\n'); print('the reason'); raise SystemExit(3)"
    with Supervisor(tmp_path) as launcher:
        launcher.start(python("broken", code))
        with pytest.raises(ProgramFailed) as failure:
            launcher.wait("broken")
    sentence, *log = str(failure.value).splitlines()
    assert sentence == f"broken ended with exit code 3; the end of its log {tmp_path / 'broken.log'}:"
    assert log == [*map(str, range(86, 100)), "the reason"]


def test_a_killed_program_is_named_with_its_signal(tmp_path):
    child = Child(python("killed", "import os; os.kill(os.getpid(), 9)"), tmp_path / "log")
    with pytest.raises(ProgramFailed, match=r"^killed was ended by SIGKILL; "):
        wait_for(child)


def test_a_server_that_fails_ends_the_wait_for_its_client(tmp_path):
    with Supervisor(tmp_path) as launcher:
        launcher.start(python("server", "import time; time.sleep(0.5); raise SystemExit(1)"), python("client", SLEEP))
        client = launcher["client"]
        with pytest.raises(ProgramFailed, match=r"^server ended with exit code 1; "):
            launcher.wait("client")
    assert client.poll() == -signal.SIGTERM


def test_waiting_calls_the_watcher_also_after_the_end(tmp_path):
    child = Child(python("short", "import time; time.sleep(0.5)"), tmp_path / "log")
    seen = []
    wait_for(child, watch=lambda: seen.append(child.poll()))
    assert len(seen) > 1 and seen[0] is None and seen[-1] == 0


def test_a_server_is_ready_once_its_file_is_there_and_a_file_of_an_earlier_one_does_not_count(tmp_path):
    (tmp_path / "ready.json").write_text('{"port": 1}')
    with Supervisor(tmp_path) as launcher:
        launcher.start(server(tmp_path))
        assert launcher["server"].ready()["port"] == 1234
        assert launcher.stop("server") == 0


@pytest.mark.parametrize(
    ("code", "sentence"),
    [("raise SystemExit(2)", "slow ended with exit code 2"), (SLEEP, "slow was not ready within 1 s")],
)
def test_a_server_that_is_never_ready_is_named(code, sentence, tmp_path):
    with Supervisor(tmp_path) as launcher:
        launcher.start(python("slow", code, ready_file=tmp_path / "ready.json"))
        with pytest.raises(ProgramFailed, match=f"^{sentence}; the end of its log"):
            launcher["slow"].ready(timeout_s=20 if "Exit" in code else 1)


@pytest.mark.parametrize("dies_first", [False, True])
def test_a_restarted_server_is_another_process_of_the_same_command_and_log(dies_first, tmp_path):
    with Supervisor(tmp_path) as launcher:
        launcher.start(server(tmp_path))
        first = launcher["server"].ready()["pid"]
        if dies_first:
            launcher["server"].kill()
        launcher.restart("server")
        second = launcher["server"].ready()["pid"]
        assert second == launcher["server"].pid != first
        assert is_alive(second) and not is_alive(first)
        assert launcher["server"].output() == "serving\n" * 2


def test_stopping_kills_a_program_that_ignores_sigterm_and_its_children_after_the_grace(tmp_path):
    child = Child(python("ignores_sigterm", IGNORES_SIGTERM, tmp_path / "pid"), tmp_path / "log")
    grandchild = written(tmp_path / "pid")
    started = time.monotonic()
    assert child.stop(grace_s=1.0) == -signal.SIGKILL
    assert 1.0 <= time.monotonic() - started < 15
    assert soon(lambda: not is_alive(grandchild))


def test_waiting_for_a_program_ends_the_children_that_it_left(tmp_path):
    with Supervisor(tmp_path) as launcher:
        launcher.start(python("family", FAMILY, tmp_path / "pid"))
        launcher.wait("family")
        assert soon(lambda: not is_alive(written(tmp_path / "pid")))


def test_leaving_stops_programs_and_their_children_in_reverse_order(tmp_path):
    code = "import pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    code += "pathlib.Path(sys.argv[1]).touch()\ntry:\n    time.sleep(600)\nfinally:\n    print(time.monotonic())"
    names = ("first", "second")
    with Supervisor(tmp_path) as launcher:
        launcher.start(*(python(name, code, tmp_path / name) for name in names))
        launcher.start(python("family", FAMILY + SLEEP, tmp_path / "pid"))
        assert soon(lambda: all((tmp_path / name).exists() for name in names))
        grandchild = written(tmp_path / "pid")
    first, second = (float((tmp_path / f"{name}.log").read_text()) for name in names)
    assert second < first
    assert soon(lambda: not is_alive(grandchild))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_launcher_leaves_no_program(number, tmp_path):
    launcher = f"""
import sys, time
from pathlib import Path
from nemo_style_rlhf.launch.supervisor import Supervisor
from nemo_style_rlhf.launch.program import Program
with Supervisor(Path({str(tmp_path)!r})) as launcher:
    launcher.start(*(Program(name, [sys.executable, "-c", {SLEEP!r}]) for name in ("one", "two")))
    print(launcher["one"].pid, launcher["two"].pid, flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", launcher], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    children = [int(word) for word in process.stdout.readline().split()]
    assert len(children) == 2 and all(map(is_alive, children))
    os.kill(process.pid, number)
    assert process.wait(30) == -number
    assert soon(lambda: not any(map(is_alive, children)))


def test_a_program_outlives_the_thread_that_asked_for_it(tmp_path):
    with Supervisor(tmp_path) as launcher:
        thread = threading.Thread(target=launcher.start, args=(python("sleeper", SLEEP),))
        thread.start()
        thread.join()
        again = threading.Thread(target=launcher.restart, args=("sleeper",))
        again.start()
        again.join()
        time.sleep(0.5)
        assert launcher["sleeper"].poll() is None

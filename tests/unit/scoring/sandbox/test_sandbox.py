"""What a program in a sandbox sees and can do, as root and as an ordinary user."""

import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.reward import FunctionRewardConfig
from nemo_style_rlhf.scoring import code_judge, sandbox
from nemo_style_rlhf.scoring.function import FunctionScorer
from nemo_style_rlhf.scoring.interface import ScoringSample
from nemo_style_rlhf.scoring.sandbox import SandboxLimits, confined
from tests.support.example_rewards import REWARDS
from tests.support.folders import let_others_read
from tests.support.paths import ROOT
from tests.unit.scoring.sources import wait_until

pytestmark = pytest.mark.slow("each starts a sandbox")

NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"


def said(code: str, *, limits: SandboxLimits | None = None, **given: object) -> object:
    """What ``code`` leaves in ``answer``."""
    program = f"import json, os\n{code}\nprint(json.dumps(answer))"
    command = [sys.executable, "-I", "-c", program]
    with confined(command, limits or SandboxLimits(), stdout=subprocess.PIPE, **given) as process:
        return json.loads(process.communicate(timeout=60.0)[0])


ACHIEVED = """
def achieved(*attempts):
    done = []
    for attempt in attempts:
        try:
            attempt()
            done.append(attempts.index(attempt))
        except OSError:
            pass
    return done
"""


def test_it_sees_python_and_an_empty_folder():
    answer = said(
        "answer = [os.listdir('/tmp'), os.getcwd(), os.path.exists('/proc'), os.path.exists('/home'), os.listdir('/dev/shm')]"
    )
    below_home = [Path(prefix) for prefix in (sys.prefix, sys.base_prefix) if prefix.startswith("/home/")]
    assert answer == [[], "/tmp", False, bool(below_home), []]
    if below_home:
        assert set(said("answer = os.listdir('/home')")) == {prefix.parts[2] for prefix in below_home}
    assert said("answer = sorted(os.listdir('/etc'))") == sorted(
        name for name in ("alternatives", "ld.so.cache", "localtime") if Path("/etc", name).exists()
    )
    assert said("answer = dict(os.environ)") == {
        "PATH": os.defpath, "HOME": "/tmp", "TMPDIR": "/tmp", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8", "PWD": "/tmp",
    }  # fmt: skip


def test_it_is_nobody_in_namespaces_of_its_own():
    assert said("answer = [os.getuid(), os.getgid(), os.uname().nodename]") == [NOBODY, NOBODY, "sandbox"]
    assert said("answer = [os.getpid() < 5, os.getppid() < 5]") == [True, True]


def test_its_namespaces_are_not_those_of_the_host():
    """Looked at from outside: inside there is no /proc, and the filter alone would keep sockets from being opened."""
    with confined(["sleep", "60"]) as process:

        def innermost() -> list[psutil.Process]:
            below = psutil.Process(process.pid).children(recursive=True)
            return [each for each in below if each.name() == "sleep"]

        wait_until(innermost)
        (asleep,) = innermost()
        for kind in ("net", "ipc", "pid", "mnt", "user", "uts"):
            assert os.readlink(f"/proc/{asleep.pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind


def test_files_of_the_run_and_of_the_user_are_not_there(tmp_path):
    (tmp_path / "token").write_text("a-shared-secret")
    looked = [
        str(tmp_path / "token"),
        str(ROOT / "README.md"),
        str(Path.home() / ".bashrc"),
        "/etc/passwd",
        "/etc/hostname",
    ]
    assert said(f"answer = [path for path in {looked} if os.path.exists(path)]") == []
    assert said(f"answer = open({looked[0]!r}).read()", readable=[looked[0]]) == "a-shared-secret"


def test_nothing_but_its_folder_can_be_written(tmp_path):
    places = [f"{folder}/x" for folder in ("", "/dev", "/dev/shm", "/usr", sys.prefix, sys.base_prefix, "/etc", "/tmp")]
    code = f"{ACHIEVED}answer = achieved(*[lambda p=p: open(p, 'w') for p in {places}])"
    assert said(code) == [len(places) - 1]
    assert not [path for path in places if Path(path).exists()]


@pytest.mark.parametrize(
    "attempt",
    [
        "os.fork()",
        "__import__('subprocess').run(['/bin/true'])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "__import__('pty').fork()",
        "__import__('multiprocessing').get_context('fork').Process(target=print).start()",
        "__import__('multiprocessing').get_context('spawn').Process(target=print).start()",
        "os.kill(os.getppid(), 0)",
        "__import__('socket').create_connection(('127.0.0.1', 9), 1)",
        "__import__('socket').socket(16, 3)",
        "call('ptrace', 16, 1, 0, 0)",
        "call('unshare', 0x10000000)",
        "call('shmget', 0, 4096, 0o1600)",
        "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
        "call('setns', 0, 0)",
        "call('clone', 17, 0, 0, 0, 0)",
        "os.chroot('/tmp')",
        "os.setuid(0)",
        "os.mknod('/tmp/null', 0o20666, os.makedev(1, 3))",
        "__import__('resource').setrlimit(4, (1, 1)) or __import__('resource').setrlimit(0, (60, 60))",
    ],
)
def test_what_is_refused(attempt):
    call = """
import ctypes
def call(name, *given):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*given) == -1:
        raise OSError(ctypes.get_errno(), name)
"""
    code = f"{call}{ACHIEVED}\ntry: answer = achieved(lambda: {attempt})\nexcept ValueError: answer = []"
    assert said(code) == []


def test_threads_are_fine():
    code = "import threading\nanswer = []\nt = threading.Thread(target=answer.append, args=(1,))\nt.start()\nt.join()"
    assert said(code) == [1]


def test_its_files_together_are_bounded():
    code = """
answer = 0
try:
    for number in range(100):
        with open(str(number), 'wb') as file: file.write(bytes(1 << 20))
        answer += 1
except OSError: pass
"""
    assert said(code, limits=SandboxLimits(folder_bytes=8 << 20)) == 8


def test_it_ends_with_the_context():
    with confined([sys.executable, "-I", "-c", "import time; time.sleep(600)"]) as process:
        time.sleep(0.5)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
    deadline = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in [process.pid, *children]):
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)


def test_an_ordinary_user_has_a_sandbox_too(tmp_path):
    """The tests' interpreter may lie where that user cannot read it, so the system's Python runs a copy of the files."""
    copy = tmp_path / "copy"
    for name in ("__init__.py", "errors.py", "processes/__init__.py", "processes/child.py", "processes/confine.py",
                 "processes/tree.py", "scoring/__init__.py", "scoring/code_judge.py", "scoring/code_peers.py",
                 "scoring/sandbox.py"):  # fmt: skip
        (copy / "nemo_style_rlhf" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "nemo_style_rlhf" / name, copy / "nemo_style_rlhf" / name)
    let_others_read(copy)
    program = (
        f"import os, sys\nsys.path.insert(0, {str(copy)!r})\nfrom nemo_style_rlhf.scoring.code_judge import passed_tests\n"
        "print(os.getuid() == 0, passed_tests('import os\\ndef add(a, b): return a + b', "
        "['assert add(1, 2) == 3', 'assert add(1, 2) == 4', 'assert os.getuid() == 65534']))"
    )
    other = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.geteuid() == 0 else []
    command = [*other, SYSTEM_PYTHON, "-c", program]
    # Without the LD_PRELOAD that vLLM, where an earlier test has used it, leaves for a file that user cannot read.
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env={"PATH": os.defpath})
    assert (done.stdout.strip(), done.stderr) == ("False {0, 2}", "")


# --- without one ------------------------------------------------------------------------------------------------------


def without_bubblewrap(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the scorer of examples/rewards/code_tests.py and score one response where bwrap is not in PATH."""
    os.symlink(shutil.which("prlimit") or "", tmp_path / "prlimit")
    program = f"""
import logging
from nemo_style_rlhf.schema.reward import FunctionRewardConfig
from nemo_style_rlhf.scoring.function import FunctionScorer
from nemo_style_rlhf.scoring.interface import ScoringSample
logging.basicConfig()
if __name__ == "__main__":
    scorer = FunctionScorer(FunctionRewardConfig(path={str(REWARDS / "code_tests.py")!r}, weight=1.0, processes=1))
    sample = ScoringSample.of_texts(None, "", "def add(a, b): return a + b", "assert add(1, 2) == 3")
    print(scorer.score([sample]).result(60).rewards.tolist())
    scorer.close()
"""
    (tmp_path / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT), sandbox.WITHOUT: "", **environment},
        capture_output=True,
        text=True,
    )


def test_a_machine_without_bubblewrap_is_refused_at_the_start(tmp_path):
    done = without_bubblewrap(tmp_path)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1] == (
        "nemo_style_rlhf.errors.UserError: code cannot be run in a sandbox on this machine: bwrap is not installed; install "
        "bubblewrap and allow user namespaces, or set NSR_CODE_WITHOUT_SANDBOX=1 if this machine holds nothing that the code of "
        "a response must not read, change or delete"
    )


def test_without_a_sandbox_by_choice_it_warns_and_judges(tmp_path):
    done = without_bubblewrap(tmp_path, NSR_CODE_WITHOUT_SANDBOX="1")
    assert done.stdout.strip() == "[1.0]", done.stderr
    assert (
        "runs without a sandbox and can read, change and delete what this user can (bwrap is not installed)"
        in done.stderr
    )


HIDES = """
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 256)
    with open({note!r}, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists({note!r}):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("end", ["pass", "time.sleep(600)", "os._exit(1)"], ids=["well", "hangs", "crashes"])
@pytest.mark.parametrize("whose", ["code", "tests"])
def test_without_a_sandbox_no_process_outlives_the_judge(tmp_path, monkeypatch, end, whose):
    """Neither one of the code nor one of the tests, in a session of its own and with another parent."""
    monkeypatch.setattr(code_judge, "confined", partial(sandbox._started, False))
    note = tmp_path / "pid"
    hides = f"import os, time\n{HIDES.format(note=str(note))}\n{end}"
    code, test = (hides, "assert True") if whose == "code" else ("", hides)
    code_judge.passed_tests(code, [test], wall_s=5.0)
    assert not psutil.pid_exists(int(note.read_text()))


def test_without_a_sandbox_none_outlives_a_killed_judge(tmp_path):
    note = tmp_path / "pid"
    program = (
        "import sys\nfrom nemo_style_rlhf.scoring import code_judge, sandbox\nfrom functools import partial\n"
        "code_judge.confined = partial(sandbox._started, False)\ncode_judge.passed_tests(sys.argv[1], ['pass'], wall_s=600)"
    )
    code = f"import os, time\n{HIDES.format(note=str(note))}\ntime.sleep(600)"
    judge = subprocess.Popen([sys.executable, "-c", program, code], cwd=ROOT)
    try:
        wait_until(lambda: note.exists() and note.read_text())
    finally:
        judge.kill()
        judge.wait()
    hidden = int(note.read_text())
    wait_until(lambda: not psutil.pid_exists(hidden))
    assert not psutil.pid_exists(hidden)


def test_a_sandbox_that_cannot_start_is_no_sandbox(tmp_path, monkeypatch):
    """A container that forbids user namespaces has bubblewrap installed all the same."""
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "defpath", os.environ["PATH"])
    with pytest.raises(UserError, match="bwrap failed with 'bwrap: No permissions to create new namespace'; install"):
        sandbox.require_sandbox.__wrapped__()


# --- judged code ------------------------------------------------------------------------------------------------------


def test_code_ends_with_a_killed_worker(tmp_path):
    """A time limit of the reward function ends what its worker had started."""
    note = tmp_path / "pid"
    path = tmp_path / "slow.py"
    path.write_text(
        f"import sys\nsys.path.append({str(REWARDS)!r})\nimport code_tests\ncode_tests.WALL_S = 600.0\n"
        f"import subprocess, pathlib\n"
        "class Noted(subprocess.Popen):\n"
        "    def __init__(self, *args, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n"
        f"        pathlib.Path({str(note)!r}).write_text(str(self.pid))\n"
        "subprocess.Popen = Noted\nreward_func = code_tests.reward_func\n"
    )
    scorer = FunctionScorer(FunctionRewardConfig(path=str(path), weight=1.0, timeout_s=2.0, processes=1))
    try:
        sleeper = ScoringSample.of_texts(None, "p", "import time; time.sleep(600)", "assert True")
        with pytest.raises(Exception, match="ran longer than 2 s"):
            scorer.score([sleeper]).result(30)
    finally:
        scorer.close()
    deadline = time.monotonic() + 5.0
    while os.path.exists(f"/proc/{note.read_text()}"):
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)

"""A node of a Slurm job restarts its engines, gives them GPUs, and sets the variables of a rank."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_style_rlhf.launch.local import LINGER_S
from nemo_style_rlhf.launch.slurm_node import visible_gpus
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow("each starts processes")

PROGRAM = f"""#!{sys.executable}
import json, os, sys
if sys.argv[1] == "-I":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
codes = os.environ["CODES"].split()
with open(os.environ["NOTES"], "a") as notes:
    print(json.dumps(dict(os.environ)), file=notes)
with open(os.environ["NOTES"]) as notes:
    code = int(codes[len(notes.readlines()) - 1])
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""
"""Notes its environment, and ends with the next exit code, or by the signal of a negative one."""


def run(folder: Path, *words: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, str]]]:
    """slurm_node.py with such an interpreter, and the environments of the programs that it started."""
    python = folder / "python"
    python.write_text(PROGRAM)
    python.chmod(0o755)
    given = {
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "8",
        "NOTES": str(folder / "notes"),
        **variables,
    }
    code = f"import sys; sys.executable = {str(python)!r}; from nemo_style_rlhf.launch.slurm_node import main"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit(main(*{words!r}))"], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={name: each for name, each in os.environ.items() if name not in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")} | given,
    )  # fmt: skip
    notes = folder / "notes"
    return done, [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def engine(
    folder: Path, gpus: int = 1, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, str]]]:
    (folder / "this_run.yaml").touch()
    return run(folder, "engine", str(folder), "127.0.0.1", "2", str(gpus), **variables)


def test_an_engine_that_dies_is_started_again_and_one_that_refuses_its_settings_only_twice(tmp_path: Path) -> None:
    done, starts = engine(tmp_path, CODES="1 2 1 2 1 2")
    assert done.returncode == 2 and len(starts) == 6, done.stderr
    *restarts, last = done.stdout.splitlines()
    assert restarts == [
        f"engine-5 ended with exit code {end}"
        for end in (
            "1 and is started again",
            "2 and is started again (1 of 2 restarts with exit code 2)",
            "1 and is started again",
            "2 and is started again (2 of 2 restarts with exit code 2)",
            "1 and is started again",
        )
    ]
    assert last == "engine-5 ended with exit code 2, one failure more than the 2 allowed with exit code 2, see above"


def test_an_engine_that_is_told_to_end_is_not_started_again(tmp_path: Path) -> None:
    done, starts = engine(tmp_path, CODES="0")
    assert (done.returncode, done.stdout, len(starts)) == (0, "", 1)


def test_each_engine_of_a_node_has_gpus_of_its_own(tmp_path: Path) -> None:
    _, (start,) = engine(tmp_path, gpus=2, CODES="0", CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert start["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_too_few_gpus_are_one_sentence(tmp_path: Path) -> None:
    done, starts = engine(tmp_path, gpus=2, CUDA_VISIBLE_DEVICES="4,5,6")
    assert done.returncode == 2 and not starts
    assert done.stdout.startswith("error: ENGINES_PER_NODE=2 with GPUS_PER_ENGINE=2, but ")
    assert done.stdout.endswith(" shows 3 GPUs\n")


def test_a_rank_gets_its_variables_and_its_share_of_the_cores(tmp_path: Path) -> None:
    done, (start,) = run(tmp_path, "task", "USR1", "4", "10.0.0.1", "5000", "trainer.py", CODES="75")
    assert done.returncode == 75
    ranks = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    wanted = {**ranks, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}
    wanted["OMP_NUM_THREADS"] = str(-(-len(os.sched_getaffinity(0)) // 4))
    assert {name: start.get(name) for name in wanted} == wanted


def test_a_killed_program_ends_as_a_shell_says_it(tmp_path: Path) -> None:
    done, _ = run(tmp_path, "task", "USR1", "1", "-", "-", "trainer.py", CODES="-9", SLURM_NTASKS="1")
    assert done.returncode == 137


def test_a_signal_that_comes_while_it_ends_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """An object of the ending interpreter sends it, when Python has restored the default handlers."""
    late = f"""
import os, sys
from nemo_style_rlhf.launch.slurm_node import main
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, {signal.SIGUSR2:d})
        kill(pid, {signal.SIGTERM:d})
late = Late()
sys.exit(main("task", "USR1", "1", "-", "-", "-c", "raise SystemExit(75)"))
"""
    done = subprocess.run([sys.executable, "-c", late], cwd=ROOT, env={**os.environ, "SLURM_NTASKS": "1"}, timeout=60)
    assert done.returncode == 75


def test_a_program_runs_in_the_group_and_with_the_options_of_its_interpreter_and_is_not_waited_for_longer(
    tmp_path: Path,
) -> None:
    """Slurm ends what it leaves behind."""
    program = """
import os, subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(sys.flags.dev_mode, os.getpgid(0) == os.getpgid(os.getppid()), left.pid)
"""
    words = ["-X", "dev", "-m", "nemo_style_rlhf.launch.slurm_node", "task", "USR1", "1", "-", "-", "-c", program]
    with (tmp_path / "output").open("w") as output:
        began = time.monotonic()
        subprocess.run(
            [sys.executable, *words], cwd=ROOT, env={**os.environ, "SLURM_NTASKS": "1"}, stdout=output, check=True, timeout=60
        )  # fmt: skip
        took = time.monotonic() - began
    *said, left = (tmp_path / "output").read_text().split()
    os.kill(int(left), signal.SIGKILL)
    assert said == ["True", "True"] and took < LINGER_S


def test_a_message_of_nvidia_smi_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for text, found in [("echo NVIDIA-SMI has failed; exit 9", []), ("echo 0; echo 1", ["0", "1"])]:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        assert visible_gpus() == found

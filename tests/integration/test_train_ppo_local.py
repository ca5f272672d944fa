"""PPO by one command: deaths of its processes leave no trace in the result, Ctrl-C leaves nothing at all."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nemo_style_rlhf.launch.interrupt import INTERRUPTED_EXIT
from nemo_style_rlhf.launch.local import Child
from nemo_style_rlhf.launch.program import ACTOR_PYTHON, Program
from tests.support import ppo_runs
from tests.support.critic_server import left_of
from tests.support.ppo_runs import launched, launched_actor, left_on_disk, result, segments
from tests.support.processes import run_pair

SCRIPT = "trainers/train_ppo_local.py"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ppo_runs.save_inputs(tmp_path_factory.mktemp("local_runs") / "inputs")


class Local(Child):
    """The command, as a shell starts it, and its processes."""

    def __init__(self, folder: Path, *words: str) -> None:
        argv = [str(ACTOR_PYTHON), SCRIPT, f"run.output_dir={folder}", *words]
        super().__init__(Program("local", argv), folder.with_suffix(".log"))
        self.folder = folder

    def wait_for(self, path: Path) -> Path:
        while not path.exists():
            assert self.poll() is None, self.output()
            time.sleep(0.01)
        return path

    def wait_for_step(self, step: int) -> None:
        self.wait_for(self.folder / "actor" / "rollouts" / f"step_{step:06d}.parquet")

    def process(self, script: str) -> psutil.Process:
        """The process that runs ``script``."""
        children = [child for supervisor in psutil.Process(self.pid).children() for child in supervisor.children()]
        alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        (found,) = (child for child in alive if script in " ".join(child.cmdline()))
        return found


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Callable[..., Local]]:
    started: list[Local] = []

    def start(*words: str) -> Local:
        started.append(Local(tmp_path / "run", *words))
        return started[-1]

    yield start
    for each in started:
        each.stop()


def test_engine_server_and_actor_are_killed_and_the_result_is_that_of_the_two_commands_undisturbed(
    inputs, local, tmp_path
):
    undisturbed = tmp_path / "two_commands"
    run_pair(undisturbed, ppo_runs.server_overrides(inputs), launched_actor(inputs))
    run = local(*launched(inputs))
    run.wait_for_step(1)
    ready = run.wait_for(run.folder / "actor" / "engines" / "engine-0.json")
    servers = [run.process("serve_ppo_critic")]
    os.kill(json.loads(ready.read_text())["pid"], signal.SIGKILL)
    servers[0].kill()
    run.wait_for_step(3)
    servers.append(run.process("serve_ppo_critic"))
    run.process("train_ppo_actor").kill()
    started = psutil.Process(run.pid).children(recursive=True)
    assert run.wait(240) == 0, run.output()
    for death in ("engine engine-0 is lost", "critic was ended by SIGKILL and is", "actor was ended by SIGKILL and is"):
        assert run.output().count(death) == 1, run.output()
    assert not left_of(started)
    assert segments(run.folder, [server.pid for server in servers]) == [] == left_on_disk(run.folder)
    assert result(run.folder) == result(undisturbed)


def test_ctrl_c_leaves_nothing(inputs, local):
    run = local(*launched(inputs))
    run.wait_for_step(3)
    server = run.process("serve_ppo_critic")
    started = psutil.Process(run.pid).children(recursive=True)
    assert len(started) > 4
    assert segments(run.folder, [server.pid]) and left_on_disk(run.folder)
    os.killpg(run.pid, signal.SIGINT)  # the processes lead groups of their own, as in a terminal
    assert run.wait(30) == INTERRUPTED_EXIT, run.output()
    assert re.search(r"^stopped in step \d; step 2 is saved; the same command goes on$", run.output(), re.MULTILINE)
    assert not left_of(started)
    assert segments(run.folder, [server.pid]) == [] == left_on_disk(run.folder)


MISTAKES = {
    "unknown key": (["critic.engine.zero_stag=1"], r"key critic\.engine\.zero_stag: .*, did you mean zero_stage\?"),
    "no reward model": (["critic.model.path=./none"], r"critic\.model\.path=\./none: there is no such folder"),
    "no reference": (["model.reference_path=./none"], r"model\.reference_path=\./none: there is no such folder"),
    "not given": (["critic.model.path="], r"critic\.model\.path is not set: give the reward model"),
    "the critic's range": (
        ["critic.value_model.loss_clip_val=-1"],
        r"critic: value_model\.loss_clip_val=-1\.0 is not possible",
    ),
    "only the critic sees it": (["critic.model.path={inputs}/policy"], r"critic: .*/policy.*"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake, inputs, local):
    words, sentence = MISTAKES[mistake]
    run = local(*launched(inputs), *(word.format(inputs=inputs) for word in words))
    assert run.wait(60) == 2, run.output()
    (error,) = (line for line in run.output().splitlines() if "error" in line or "Traceback" in line)
    assert re.match(f"error: .*{sentence}", error), error

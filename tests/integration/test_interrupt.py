"""Ctrl-C in real processes: one sentence, exit code 130, nobody left behind; the same command goes on."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from nemo_style_rlhf.launch.interrupt import INTERRUPTED_EXIT
from nemo_style_rlhf.launch.preemption import PREEMPTED_EXIT
from nemo_style_rlhf.launch.program import ACTOR_PYTHON, SERVER_PYTHON, Program
from tests.support.critic_server import left_of
from tests.support.models import save_run_inputs
from tests.support.processes import Process, start_server, wait_for_output

REWARD = """
import time
def reward_func(queries, prompts, labels):
    time.sleep(0.2)
    return [len(set(query.split())) for query in queries]
"""
ACTOR = [
    "trainers/train_ppo_actor.py", "model=fp32", "run.num_threads=1", "algorithm=grpo", "algorithm.num_rollout_samples=16",
    "algorithm.max_steps=400", "generation=hf", "generation.max_length=8", "checkpoint.save_interval=2",
]  # fmt: skip
SFT = [
    "trainers/train_sft.py", "model.dtype=float32", "run.num_threads=1", "trainer.max_steps=100000", "trainer.batch_size=4",
    "checkpoint.save_interval=5", "trainer.log_interval=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    rows = [{"prompt": f"w{i} w{i + 1}", "response": f"w{i + 2}"} for i in range(40)]
    return save_run_inputs(tmp_path_factory.mktemp("inputs"), REWARD, rows)


class Started(Process):
    """A process of which Ctrl-C reaches all of its group, as from a terminal."""

    def wait_until_listening(self) -> None:
        """Until it blocks SIGINT, the second of the signals in the kernel's mask: before, Python itself would answer."""
        deadline = time.monotonic() + 60
        while not int(re.search(r"SigBlk:\s+(\w+)", Path(f"/proc/{self.pid}/status").read_text())[1], 16) & 2:
            assert self.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.01)

    def ctrl_c(self) -> None:
        os.killpg(self.pid, signal.SIGINT)

    def ended(self, code: int) -> str:
        """Its sentence about where it stopped, or its last line, once it has ended with ``code`` and left nobody behind."""
        assert self.wait(60) == code, self.output()
        deadline = time.monotonic() + 10
        while left := [each for each in psutil.process_iter() if session(each.pid) == self.pid]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        assert "Traceback" not in self.output() and "Error" not in self.output(), self.output()
        lines = self.output().splitlines()  # another thread's progress bar may come last
        return ([line for line in lines if line.startswith("stopped")] or lines)[-1]


def session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


@pytest.fixture
def program(tmp_path: Path) -> Iterator:
    started: list[Started] = []
    log = tmp_path / "run" / "output.log"

    def start(*command: object, python: Path = ACTOR_PYTHON, ranks: int = 1, warm: bool = False) -> Started:
        """A ``warm`` one has its libraries already: it cannot be asked about Ctrl-C, which must be blocked before they are
        imported, nor about torchrun, which does not start it."""
        log.unlink(missing_ok=True)
        argv = [str(word) for word in (python, *command, f"run.output_dir={log.parent}")]
        started.append(Started(Program("run", argv, ranks=ranks), log, cold=None if warm else []))
        return started[-1]

    yield start
    for each in started:
        each.stop()


def grpo(inputs: Path) -> list[object]:
    return [
        *ACTOR, f"model.path={inputs / 'policy'}", f"data.train_path={inputs / 'rows.jsonl'}", "reward=function",
        f"reward.function.path={inputs / 'reward.py'}",
    ]  # fmt: skip


def has_started(process: Process, words: str) -> bool:
    """Whether a descendant of the process has the words in its command line."""
    for each in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if words in " ".join(each.cmdline()):
                return True
    return False


def committed(folder: Path) -> int:
    return max(int(path.parent.name.removeprefix("step_")) for path in folder.glob("checkpoints/step_*/manifest.json"))


def test_the_actor_says_where_it_stopped_and_the_same_command_goes_on(inputs, program, tmp_path):
    actor = program(*grpo(inputs))
    wait_for_output(actor, "GRPO 5/400")
    actor.ctrl_c()
    said = re.fullmatch(
        r"stopped in step (\d+); step (\d+) is saved; the same command goes on", actor.ended(INTERRUPTED_EXIT)
    )
    assert said, actor.output()
    steps = re.findall(r"GRPO (\d+)/400", actor.output())
    assert int(said[1]) in (int(steps[-1]) + 1, int(steps[-1])) and int(said[2]) == committed(tmp_path / "run") >= 2
    again = program(*grpo(inputs), warm=True)
    wait_for_output(again, f"resumed from step {said[2]}")
    wait_for_output(again, f"GRPO {int(said[1]) + 1}/400")


@pytest.mark.more
def test_what_a_reward_function_started_ends_too(inputs, program, tmp_path):
    """As functions that run code do; a terminal's Ctrl-C does not reach it."""
    starts = tmp_path / "starts.py"
    starts.write_text(
        "import subprocess\n\n\ndef reward_func(queries, prompts, labels):\n    subprocess.run(['sleep', '77'])\n"
    )
    actor = program(*grpo(inputs), f"reward.function.path={starts}")
    deadline = time.monotonic() + 60
    while not has_started(actor, "sleep 77"):
        assert actor.poll() is None and time.monotonic() < deadline, actor.output()
        time.sleep(0.05)
    actor.ctrl_c()
    assert actor.ended(INTERRUPTED_EXIT) == "stopped in step 1; no step is saved yet; the same command goes on"


@pytest.mark.more
def test_a_dry_run_is_undone_at_once_also_while_it_waits(inputs, program, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\n\n\ndef reward_func(queries, prompts, labels):\n    time.sleep(50)\n    return [0.0] * len(queries)\n"
    )
    actor = program(*grpo(inputs), f"reward.function.path={slow}", "--dry-run")
    deadline = time.monotonic() + 60
    while not has_started(actor, "spawn_main"):
        assert actor.poll() is None and time.monotonic() < deadline, actor.output()
        time.sleep(0.05)
    time.sleep(3)  # wherever the first rollout is by now: it cannot be done
    started = time.monotonic()
    actor.ctrl_c()
    assert actor.ended(INTERRUPTED_EXIT) == "stopped; the same command starts again"
    assert time.monotonic() - started < 30 and not (tmp_path / "run" / "dry_run").exists()


@pytest.mark.more
def test_save_on_interrupt_commits_the_running_step_and_a_second_one_ends_at_once(inputs, program, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text(REWARD.replace("0.2", "8"))
    command = [*grpo(inputs), "checkpoint.save_on_interrupt=true", "checkpoint.save_interval=100"]
    actor = program(*command)
    wait_for_output(actor, "GRPO 2/400")
    actor.ctrl_c()
    said = re.search(r"step (\d+) is committed, the run ends as it was told", actor.ended(PREEMPTED_EXIT))
    assert said and int(said[1]) == committed(tmp_path / "run") >= 2
    assert "the run ends after step" in actor.output()
    actor = program(*command, f"reward.function.path={slow}")
    wait_for_output(actor, f"GRPO {int(said[1]) + 1}/400")
    actor.ctrl_c()
    wait_for_output(actor, "Ctrl-C again ends it at once")
    actor.ctrl_c()
    assert re.fullmatch(
        rf"stopped in step \d+; step {said[1]} is saved; the same command goes on", actor.ended(INTERRUPTED_EXIT)
    )


@pytest.mark.parametrize("moment", ["", "40 rows", "waiting for"])
def test_while_it_starts(moment, inputs, program):
    """At once, while libraries and models are loaded, and while no server answers."""
    server = ["algorithm=ppo", "reward=remote_critic_rm", "remote_critic_rm.port=9"] if "wait" in moment else []
    actor = program(*grpo(inputs), *server)
    if moment:
        wait_for_output(actor, moment)
    else:
        actor.wait_until_listening()  # wherever the imports are
    actor.ctrl_c()
    assert actor.ended(INTERRUPTED_EXIT) == "stopped; the same command starts again"


@pytest.mark.more
def test_a_dry_run_leaves_nothing(inputs, program, tmp_path):
    actor = program(*grpo(inputs), "--dry-run")
    wait_for_output(actor, "40 rows")
    actor.ctrl_c()
    assert actor.ended(INTERRUPTED_EXIT) == "stopped; the same command starts again"
    assert not (tmp_path / "run" / "dry_run").exists()


@pytest.mark.more
def test_of_several_ranks_the_first_speaks(inputs, program):
    actor = program(*grpo(inputs), ranks=2)
    wait_for_output(actor, "GRPO 1/400")
    actor.ctrl_c()  # not to the ranks themselves: torchrun would end one that has yet to speak when the other has ended
    assert actor.wait(60) == 1, actor.output()
    assert actor.output().count("the same command") == 1, actor.output()


@pytest.mark.more
def test_ctrl_c_through_torchrun_commits_the_running_step_and_leaves_nobody(inputs, program, tmp_path):
    """The launcher hands it down to its ranks, which are sessions of their own, and then fails with a traceback of its own."""
    actor = program(*grpo(inputs), "checkpoint.save_on_interrupt=true", "checkpoint.save_interval=100", ranks=2)
    wait_for_output(actor, "GRPO 1/400")
    everyone = psutil.Process(actor.pid).children(recursive=True)
    assert len(everyone) >= 2 and committed(tmp_path / "run") == 0
    actor.ctrl_c()
    assert actor.wait(60) == 1, actor.output()
    assert not left_of(everyone)
    (step,) = re.findall(r"step (\d+) is committed, the run ends as it was told", actor.output())
    assert int(step) == committed(tmp_path / "run") > 0, actor.output()
    assert actor.output().count("Traceback") == actor.output().count("SignalException: Process") == 1, actor.output()


def test_a_supervised_stage_says_where_it_stopped_and_goes_on(inputs, program, tmp_path):
    command = [*SFT, f"model.path={inputs / 'policy'}", f"data.train_path={inputs / 'rows.jsonl'}"]
    stage = program(*command)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run" / "checkpoints").glob("step_*10.ckpt")):
        assert stage.poll() is None and time.monotonic() < deadline, stage.output()
        time.sleep(0.02)
    stage.ctrl_c()
    said = re.fullmatch(
        r"stopped in step (\d+); step (\d+) is saved; the same command goes on", stage.ended(INTERRUPTED_EXIT)
    )
    assert said and int(said[1]) > int(said[2]) >= 10, stage.output()
    again = program(*command)
    wait_for_output(again, f"step_{int(said[2]):08d}.ckpt")
    again.ctrl_c()
    again.ended(INTERRUPTED_EXIT)


@pytest.mark.more
def test_an_evaluation_ends_with_its_child(inputs, program, tmp_path):
    evaluation = program(
        "trainers/evaluate.py", f"checkpoints=[{inputs / 'policy'}]", f"data.path={inputs / 'rows.jsonl'}", "model.dtype=float32",
        "generation=hf", "generation.max_length=100", "samples_per_prompt=200",
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not has_started(evaluation, "spawn_main"):
        assert evaluation.poll() is None and time.monotonic() < deadline, evaluation.output()
        time.sleep(0.05)
    time.sleep(1)
    evaluation.ctrl_c()
    assert evaluation.ended(INTERRUPTED_EXIT) == "stopped; the same command starts again"
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_server_ends_with_0_and_while_it_loads_as_others(inputs, program, tmp_path):
    command = ["servers/serve_ppo_critic.py", "model.dtype=float32", f"model.path={inputs / 'reward'}", "server.port=0"]
    server = program(*command, python=SERVER_PYTHON)
    wait_for_output(server, "serving critic and reward")
    server.ctrl_c()
    server.ended(0)
    assert "received SIGINT" in server.output()
    server = program(*command, python=SERVER_PYTHON)
    server.wait_until_listening()
    server.ctrl_c()
    assert server.ended(INTERRUPTED_EXIT) == "stopped; the same command starts again"


def waits(inputs: Path, *command: object) -> list[object]:
    """An actor whose critic server is at ``remote_critic_rm.port``."""
    return [*grpo(inputs), "algorithm=ppo", "reward=remote_critic_rm", "checkpoint.save_interval=1", *command]


def test_sigusr1_ends_an_actor_that_waits_for_a_server_from_the_start(inputs, program):
    actor = program(*waits(inputs, "remote_critic_rm.port=9"), warm=True)
    wait_for_output(actor, "waiting for")
    started = time.monotonic()
    os.kill(actor.pid, signal.SIGUSR1)
    assert "told to end while no server answers; nothing is lost, the same command goes on" in actor.ended(
        PREEMPTED_EXIT
    )
    assert time.monotonic() - started < 20


@pytest.mark.more
@pytest.mark.parametrize(
    ("server", "told", "torchrun"), [("critic", [1], True), ("reward", [1], False), ("critic", [0, 1], False)]
)
def test_so_it_does_whichever_of_its_ranks_is_told(server, told, torchrun, inputs, program):
    command = {
        "critic": waits(inputs, "remote_critic_rm.port=9"),
        "reward": [*grpo(inputs), "reward=server", "reward.server.port=9"],
    }
    actor = program(*command[server], ranks=2, warm=not torchrun)
    wait_for_output(actor, "waiting for")
    everyone = psutil.Process(actor.pid).children(recursive=True)
    ranks = psutil.Process(actor.pid).children()
    assert len(ranks) == 2
    started = time.monotonic()
    for rank in told:
        ranks[rank].send_signal(signal.SIGUSR1)
    assert actor.wait(60) == 1, actor.output()  # torchrun's own, and so is its traceback where there is one
    assert time.monotonic() - started < 30
    assert actor.output().count("told to end while no server answers; nothing is lost") == 1, actor.output()
    for told_by_torchrun in ("Traceback", "raise ChildFailedError", f"(exitcode: {PREEMPTED_EXIT})"):
        assert actor.output().count(told_by_torchrun) == torchrun, actor.output()
    assert not left_of(everyone)


@pytest.mark.more
@pytest.mark.parametrize(("number", "ranks", "told"), [("SIGUSR1", 1, 0), ("SIGINT", 1, 0), ("SIGUSR1", 2, 1)])
def test_so_does_one_that_has_lost_its_server(number, ranks, told, inputs, program, tmp_path):
    """Also if only one of its ranks is told, and not the one that changes the server."""
    (tmp_path / "critic").mkdir()
    served = ["model.dtype=float32", "run.num_threads=1", f"model.path={inputs / 'reward'}"]
    server, port = start_server(tmp_path / "critic", *served)
    patience = ["remote_critic_rm.retries=0", "checkpoint.save_on_interrupt=true"]
    actor = program(*waits(inputs, f"remote_critic_rm.port={port}", *patience), ranks=ranks, warm=number == "SIGUSR1")
    try:
        wait_for_output(actor, "PPO 1/400")
    finally:
        server.kill()
    wait_for_output(actor, "waiting for")
    processes = psutil.Process(actor.pid).children() if ranks > 1 else [psutil.Process(actor.pid)]
    started = time.monotonic()
    processes[told].send_signal(getattr(signal, number))
    code = actor.wait(60)
    assert time.monotonic() - started < 20
    assert code == (PREEMPTED_EXIT if ranks == 1 else 1), actor.output()  # torchrun's own
    step = committed(tmp_path / "run")
    assert f"told to end while no server answers; step {step} is committed, the same command goes on" in actor.output()


@pytest.mark.more
def test_an_actor_whose_server_does_not_come_back_says_how_it_was_lost(inputs, program, tmp_path):
    (tmp_path / "critic").mkdir()
    served = ["model.dtype=float32", "run.num_threads=1", f"model.path={inputs / 'reward'}"]
    server, port = start_server(tmp_path / "critic", *served)
    patience = ["remote_critic_rm.retries=0", "remote_critic_rm.wait_for_server_s=3"]
    actor = program(*waits(inputs, f"remote_critic_rm.port={port}", *patience), warm=True)
    try:
        wait_for_output(actor, "PPO 1/400")
    finally:
        server.kill()
    waited = r"error: no critic server answers at .* \(waited \d+ s, remote_critic_rm\.wait_for_server_s\)"
    assert re.fullmatch(waited + "; it was lost with: .*critic server.*", actor.ended(2)), actor.output()


@pytest.mark.more
def test_ranks_go_on_together_when_a_disk_refuses_one_of_them_until_it_has_done_so_too_often(inputs, program, tmp_path):
    command = [*grpo(inputs), "checkpoint.save_interval=1", "checkpoint.max_failed_saves=3"]
    actor = program(*command, ranks=2, warm=True)
    wait_for_output(actor, "GRPO 1/400")
    follower = psutil.Process(actor.pid).children()[1]
    for room in (2**10, psutil.RLIM_INFINITY, 2**10):
        seen, before = len(actor.output()), committed(tmp_path / "run")
        follower.rlimit(psutil.RLIMIT_FSIZE, (room, psutil.RLIM_INFINITY))
        if room == 2**10:
            wait_for_output(actor, "(failure 1,", after=seen)
            continue
        deadline = time.monotonic() + 60
        while committed(tmp_path / "run") <= before + 1:
            assert actor.poll() is None and time.monotonic() < deadline, actor.output()
            time.sleep(0.05)
    assert actor.wait(60) == 1, actor.output()
    errors = [line for line in actor.output().splitlines() if line.startswith("error: ")]
    last = committed(tmp_path / "run")
    assert errors and f"started again, the run resumes from step {last}" in errors[0], actor.output()
    again = program(*command, ranks=2, warm=True)
    wait_for_output(again, f"resumed from step {last}")

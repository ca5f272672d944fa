"""Episodes in worker processes, and every way in which environments spoil them."""

import datetime
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from nemo_style_rlhf.agents.environment import Action, Observation, Task
from nemo_style_rlhf.agents.events import Asked, Failed
from nemo_style_rlhf.agents.workers import LOSSES, EpisodeWorkers
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.agent import AgentConfig
from tests.unit.agents.episodes import (
    Run,
    alive,
    config,
    descendants,
    environment,
    group_is_empty,
    line_of,
    parent_of,
    usual_end,
    wait_until,
)

pytestmark = pytest.mark.slow("each starts workers")


def test_an_episode_of_two_turns(tmp_path):
    with Run(config(tmp_path)) as run:
        run.play(["fine"])
    assert [each.observation.messages for each in run.asked] == [({"role": "user", "content": "fine"},), "turn 1"]
    assert [each.observation.reward for each in run.asked] == [0.0, 0.5]
    assert run.ended[0].observation == usual_end(0) and run.ended[0].seconds > 0
    assert run.failed == {}


def test_an_episode_that_reaches_a_limit_ends_with_what_asked(tmp_path):
    notes = tmp_path / "notes"
    with Run(config(tmp_path), finish_at=1) as run:
        run.play(["fine"], str(notes))
    assert run.ended[0].observation == Observation("turn 1", 0.5, metrics={"seed": 0})
    assert notes.read_text() == "closed fine\n"


def test_an_episode_that_fails_is_tried_again(tmp_path):
    with Run(config(tmp_path, attempts=3)) as run:
        run.play(["later"])
    assert run.ended[0].attempt == 3 and run.ended[0].observation == usual_end(0)
    assert [(each.attempt, each.last, each.charged) for each in run.failed[0]] == [(1, False, True), (2, False, True)]


NO_ANSWER = "gave no answer within 0.5 s (agent.step_timeout_s), when it waited in line"
BUSY = "kept its process busy for more than 0.5 s (agent.step_timeout_s): await what takes long"
FAULTS = [
    ("error", f"raised IndexError: list index out of range (line {line_of('[][0]')}): correct it", False),
    ("leave", f"raised SystemExit: 4 (line {line_of('sys.exit(4)')}): correct it", False),
    (
        "leave_in_a_task",
        f"raised RuntimeError: SystemExit: 4 (line {line_of('create_task(leave())')}): correct it",
        False,
    ),
    ("hang", f"{NO_ANSWER} {line_of('await answer')}", True),
    ("stubborn", "gave no answer within 0.5 s (agent.step_timeout_s), and could not be interrupted", True),
    ("block", BUSY, True),
    ("spin", BUSY, True),
    ("exit", "ended its process with exit code 3: correct it", False),
    ("exit_in_a_task", "ended its process with exit code 5: correct it", False),
    ("kill", "ended its process by SIGKILL: correct it", False),
    ("kill_its_group", "ended its process by SIGKILL: correct it", False),
    ("segfault", "ended its process by SIGSEGV: correct it", False),
]


@pytest.mark.parametrize("prompt, said, timed_out", FAULTS, ids=[prompt for prompt, *_ in FAULTS])
def test_what_fails_every_time_is_given_up_and_its_neighbor_goes_on(tmp_path, prompt, said, timed_out):
    with Run(config(tmp_path)) as run:
        run.play([prompt, "fine"])
    first, second = run.failed[0]
    assert first.reason == second.reason == f"Environment of {tmp_path / 'my_env.py'} {said}"
    assert (first.last, first.charged, first.timed_out) == (False, True, timed_out)
    assert (second.last, second.charged, second.timed_out) == (True, True, timed_out)
    assert run.ended[1].observation == usual_end(1)
    assert not any(each.charged or each.last or each.timed_out for each in run.failed.get(1, []))


def test_it_is_known_in_which_line_an_environment_waits_for_long(tmp_path):
    with Run(config(tmp_path, step_timeout_s=4.0, attempts=1)) as run:
        run.start(["hang", "fine"])
        run.to_the_end_of(1)
        assert wait_until(lambda: run.workers.waits_for(0) == f"Environment, line {line_of('await answer')}")
        assert run.workers.waits_for(1) == "Environment"
        run.drop()


@pytest.mark.parametrize(
    "source, name, said",
    [
        (None, "Environment", "there is no file"),
        ("import no_such_thing", "Environment", "ModuleNotFoundError: No module named 'no_such_thing' (line 1): correct"),
        ("def f(:", "Environment", "cannot be imported: SyntaxError"),
        ("import os\nos._exit(9)", "Environment", "ended its process with exit code 9 when it was imported: correct"),
        ("other = 1", "Environment", "my_env.py has no class Environment: set agent.name to the one it has"),
        ("def make(): ...", "make", "my_env.py is no class: set agent.name to the class of the environment"),
        ("class Mine: ...", "Mine", "is no environment: give it the methods reset and step"),
    ],
)  # fmt: skip
def test_a_file_without_an_environment_is_refused_at_once(tmp_path, source, name, said):
    path = tmp_path / "my_env.py"
    if source is not None:
        environment(tmp_path, source)
    with pytest.raises(UserError) as caught:
        EpisodeWorkers(AgentConfig(path=str(path), name=name), print)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_environment_may_have_its_own_order_of_calls(tmp_path):
    with Run(config(tmp_path, name="Own", attempts=1)) as run:
        run.play(["right", "wrong", "done"])
    assert run.ended[0].observation == Observation("answer 0 answer 1 answer 2", 1.0, True)
    path = tmp_path / "my_env.py"
    wrong = "answered with ['answer 0', 'answer 1', 'answer 2'], expected an Observation: correct what it returns"
    assert run.failed[1][0].reason == f"Own.execute of {path} (line {line_of('async def execute')}) {wrong}"
    done = f"raised RuntimeError: policy.act was given an observation that is done (line {line_of('done=True))')})"
    assert run.failed[2][0].reason == f"Own of {path} {done}: correct it"


def test_a_limit_unwinds_an_own_order_of_calls(tmp_path):
    with Run(config(tmp_path, name="Own"), finish_at=1) as run:
        run.play(["right"])
    assert run.ended[0].observation == Observation("right 1", metrics={"answers": 1.0})


def test_an_environment_needs_no_base_class_and_no_coroutines(tmp_path):
    with Run(config(tmp_path, name="Duck")) as run:
        run.play(["x"])
    assert run.ended[0].observation == Observation("answer 0", done=True)


def test_the_time_of_a_neighbor_that_keeps_the_process_busy_is_not_counted(tmp_path):
    """Three episodes that compute for 0.4 s each, one after the other, while others wait: 0.5 s are allowed."""
    with Run(config(tmp_path, attempts=1)) as run:
        run.play(["wait", "slow", "slow", "slow", "wait"])
    assert run.failed == {}
    assert [run.ended[number].observation.messages for number in range(5)] == [
        "waited",
        "slow",
        "slow",
        "slow",
        "waited",
    ]


def test_an_episode_has_a_time_limit_of_its_own(tmp_path):
    with Run(config(tmp_path, attempts=1, episode_timeout_s=0.5, step_timeout_s=5.0)) as run:
        run.play(["many_steps"])
    (failed,) = run.failed[0]
    assert failed.timed_out and failed.last
    said = "took more than 0.5 s in one episode (agent.episode_timeout_s), when it waited in line"
    assert failed.reason.startswith(f"Environment of {tmp_path / 'my_env.py'} {said}")


def test_threads_that_hang_leave_room_for_other_episodes(tmp_path):
    """A worker is replaced when too many of its threads are lost."""
    with Run(config(tmp_path, attempts=1, episodes_per_worker=2)) as run:
        run.play(["thread"] * 8 + ["fine"])
    assert [[each.timed_out for each in run.failed[number]] for number in range(8)] == [[True]] * 8
    assert run.ended[8].observation == usual_end(8)
    assert len(run.pids) > 1


def test_what_fails_when_it_is_closed_has_ended_all_the_same(tmp_path, capfd):
    with Run(config(tmp_path)) as run:
        run.play(["close_badly", "say"])
    assert run.ended[0].observation == usual_end(0) and run.failed == {}
    out, err = capfd.readouterr()
    assert "OSError: the door is stuck" in err and "said by the environment" in err
    assert out == ""


def test_more_episodes_than_places_wait(tmp_path):
    with Run(config(tmp_path, workers=2, episodes_per_worker=3)) as run:
        run.play(["fine"] * 40)
    assert {number: each.observation for number, each in run.ended.items()} == {n: usual_end(n) for n in range(40)}
    assert run.failed == {}


def test_rows_may_hold_what_json_has_no_type_for(tmp_path):
    with Run(config(tmp_path, name="Duck")) as run:
        row = {"when": datetime.date(2026, 1, 2), "numbers": np.arange(2), "nan": float("nan")}
        run.workers.start(0, Task("x", row=row))
        asked = run.event()
    assert asked == Asked(0, 1, Observation("x"))


def test_a_process_that_is_killed_from_outside_is_nobodys_fault_at_first(tmp_path):
    """The policy answers nothing, so no environment is at work when its process dies."""
    failed = []
    with Run(config(tmp_path)) as run:
        run.start(["fine"])
        while len(failed) < LOSSES + 2:
            event = run.event()
            if isinstance(event, Asked):
                os.kill(int(event.observation.metrics["pid"]), signal.SIGKILL)
            else:
                failed.append(event)
    by = "from outside, by a thread of an environment, or for lack of memory"
    said = f"a worker process of Environment of {tmp_path / 'my_env.py'} ended by SIGKILL, {by}"
    free = [Failed(0, n, said, False, False, charged=False) for n in range(1, LOSSES + 1)]
    assert failed == [*free, Failed(0, LOSSES + 1, said, False, False), Failed(0, LOSSES + 2, said, False, True)]


def test_a_thread_that_ends_its_process_again_and_again_ends_its_episode(tmp_path):
    with Run(config(tmp_path)) as run:
        run.play(["exit_in_a_thread", "fine"])
    assert [each.charged for each in run.failed[0]] == [False] * LOSSES + [True, True]
    assert run.failed[0][-1].last and "ended with exit code 7" in run.failed[0][-1].reason
    assert run.ended[1].observation == usual_end(1)


def test_a_process_whose_supervisor_was_killed_is_replaced(tmp_path):
    with Run(config(tmp_path)) as run:
        run.start(["fine"])
        asked = run.event()
        os.kill(parent_of(int(asked.observation.metrics["pid"])), signal.SIGKILL)
        failed = run.event()
        run.to_the_end()
    assert (failed.charged, failed.last) == (False, False)
    assert run.ended[0].observation == usual_end(0)


def test_a_file_that_cannot_be_imported_any_more_ends_every_episode(tmp_path):
    with Run(config(tmp_path, workers=2)) as run:
        environment(tmp_path, "raise ValueError('changed')")
        run.play(["exit", "exit_in_a_thread", "fine", "kill"])
    last = [run.failed[number][-1] for number in (0, 1, 3)]
    assert all(each.last and "ValueError: changed (line 1)" in each.reason for each in last)
    assert 2 in run.ended or run.failed[2][-1].last


def test_nothing_comes_of_what_is_forgotten(tmp_path):
    with Run(config(tmp_path, attempts=1)) as run:
        run.start(["fine", "fine", "hang", "stubborn", "error", "kill"] * 5)
        first = run.event()
        run.workers.forget()
        run.drop()
        run.workers.answer(first, Action("late", {"role": "assistant", "content": "late"}))
        run.play(["fine"] * 3)
        assert run.silent()
    assert {number: each.observation for number, each in run.ended.items()} == {n: usual_end(n) for n in range(3)}
    assert run.failed.keys() <= {0, 1, 2} and not any(each.charged for all_of in run.failed.values() for each in all_of)


def test_forgotten_episodes_release_what_they_hold(tmp_path):
    notes = tmp_path / "notes"
    with Run(config(tmp_path)) as run:
        run.start(["fine"], str(notes))
        run.event()
        run.workers.forget()
        assert wait_until(lambda: notes.exists() and notes.read_text() == "closed fine\n")
        assert run.silent()


def test_episodes_release_what_they_hold_when_the_run_ends(tmp_path):
    notes = tmp_path / "notes"
    with Run(config(tmp_path)) as run:
        run.start(["fine"], str(notes))
        run.event()
    assert notes.read_text() == "closed fine\n"


def test_children_of_environments_end_with_their_worker(tmp_path):
    """They have sessions of their own. A worker that keeps running keeps its children; one that is killed takes them along."""
    notes = tmp_path / "notes"
    with Run(config(tmp_path, attempts=1, workers=2)) as run:
        run.play(["child_and_block", "child"], str(notes))
    pids = [int(word) for line in notes.read_text().splitlines() for word in line.split()]
    assert len(pids) >= 4 and not any(map(alive, pids))
    assert run.failed[0][-1].timed_out and run.failed[1][-1].timed_out


ORPHANED = """
import sys
from nemo_style_rlhf.agents.environment import Action, Task
from nemo_style_rlhf.agents.events import Asked
from nemo_style_rlhf.agents.workers import EpisodeWorkers
from nemo_style_rlhf.schema.agent import AgentConfig

def emit(event):
    if isinstance(event, Asked):
        workers.answer(event, Action("x", {"role": "assistant", "content": "x"}))

workers = EpisodeWorkers(AgentConfig(path=sys.argv[1], workers=2), emit)
for number, prompt in enumerate(["child", "child_and_block"]):
    workers.start(number, Task(prompt, label=sys.argv[2]))
sys.stdin.read()
"""


def test_nothing_outlives_a_killed_trainer(tmp_path):
    notes = tmp_path / "notes"
    path = environment(tmp_path)
    trainer = subprocess.Popen([sys.executable, "-c", ORPHANED, path, notes], stdin=subprocess.PIPE)
    try:
        assert wait_until(lambda: notes.exists() and notes.read_text().count("\n") == 2)
        pids = [int(word) for line in notes.read_text().splitlines() for word in line.split()]
        assert all(map(alive, pids))
    finally:
        trainer.kill()
        trainer.communicate()
    assert wait_until(lambda: not any(map(alive, pids)))


BAD = {
    "error": 28, "give:5": 17, "give:Observation(reward=float('nan'))": 10, "hang": 20, "exit": 10, "kill": 10, "block": 3,
    "stubborn": 2,
}  # fmt: skip


def test_of_a_thousand_episodes_none_is_lost(tmp_path):
    """A tenth of them spoils its attempts, each in its way."""
    bad = [kind for kind, count in BAD.items() for _ in range(count)]
    prompts = [bad[number // 10] if number % 10 == 0 else "fine" for number in range(1000)]
    before = descendants()
    with Run(config(tmp_path, workers=2)) as run:
        run.play(prompts)
        assert run.silent()
        during = descendants() - before
    assert {number: each.observation for number, each in run.ended.items()} == {
        number: usual_end(number) for number, prompt in enumerate(prompts) if prompt == "fine"
    }
    failed_for_good = {number for number, events in run.failed.items() if events[-1].last}
    assert failed_for_good == set(range(0, 1000, 10))
    charges = {number: sum(each.charged for each in run.failed.get(number, [])) for number in range(1000)}
    assert charges == {number: 2 if number in failed_for_good else 0 for number in range(1000)}
    assert all([each.last for each in events[:-1]] == [False] * (len(events) - 1) for events in run.failed.values())
    attempts = [[each.attempt for each in events] for events in run.failed.values()]
    assert attempts == [list(range(1, len(numbers) + 1)) for numbers in attempts]
    assert during and not any(map(alive, during | run.pids)) and all(map(group_is_empty, during | run.pids))


def test_a_worker_loads_no_heavy_library():
    code = "import sys, nemo_style_rlhf.agents.worker; print({'torch', 'numpy', 'omegaconf', 'psutil'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr

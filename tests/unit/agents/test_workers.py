"""Episodes in worker processes, and every way in which environments spoil them."""

import pytest

from nemo_style_rlhf.agents.environment import Observation
from nemo_style_rlhf.agents.workers import EpisodeWorkers
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.agent import AgentConfig
from tests.unit.agents.episodes import Run, environment, line_of, usual_end


def config(folder, **given):
    path = str(environment(folder))
    return AgentConfig(**{"path": path, "workers": 1, "step_timeout_s": 0.5, "attempts": 2, **given})


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

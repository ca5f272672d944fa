"""One restart policy: failures are counted until there is progress, and one too many is one sentence."""

import sys
from pathlib import Path

import pytest

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.local import ProgramFailed
from nemo_style_rlhf.launch.program import Program
from nemo_style_rlhf.launch.supervisor import Supervisor
from tests.support.processes import soon

DIES = "import os; os.kill(os.getpid(), 9)"
REFUSES = "print('error: lr=-1 is not possible'); raise SystemExit(2)"


def test_failures_are_forgiven_up_to_the_limit_and_forgotten_with_progress(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 1, since="before the next step")
    for name in ("actor", "critic"):
        supervisor.lost(name)
    with pytest.raises(UserError, match="one failure more than restarts=1 allows before the next step"):
        supervisor.lost("actor")
    supervisor.progressed()
    supervisor.lost("actor")


def test_programs_may_share_one_count(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 1, together=True)
    supervisor.lost("actor")
    with pytest.raises(UserError, match="critic was lost, one failure more"):
        supervisor.lost("critic")


def test_a_program_that_dies_is_started_again_until_the_limit(tmp_path: Path) -> None:
    said: list[str] = []
    with Supervisor(tmp_path, 1, since="in all", say=said.append) as supervisor:
        supervisor.start(python("server", DIES))
        wait_for_end(supervisor)
        supervisor.lost("server")
        wait_for_end(supervisor)
        with pytest.raises(
            ProgramFailed, match=r"^server was ended by SIGKILL, one failure more than restarts=1 allows in all; "
        ):
            supervisor.lost("server")
    assert said == ["server was ended by SIGKILL and is started again (1 of 1 restarts in all)"]


def test_a_failure_that_does_not_count_is_followed_by_a_start_and_another_program_may_take_the_place(
    tmp_path: Path,
) -> None:
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(python("server", DIES))
        wait_for_end(supervisor)
        supervisor.lost("server", counts=False, program=python("server", "print('here')"))
        supervisor.wait("server")
    assert (tmp_path / "server.log").read_text() == "here\n"


def test_a_users_mistake_is_not_repeated_unless_it_may_be_another_kind_of_failure(tmp_path: Path) -> None:
    with Supervisor(tmp_path, 1, since="in all") as supervisor:
        supervisor.start(python("server", REFUSES))
        wait_for_end(supervisor)
        supervisor.lost("server", "it is gone", mistakes=True)
        wait_for_end(supervisor)
        with pytest.raises(UserError, match=r"^server: lr=-1 is not possible$"):
            supervisor.lost("server")


def test_a_program_that_was_started_elsewhere_is_only_counted(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 1, since="in all")
    supervisor.lost("elsewhere", "it hangs")
    with pytest.raises(
        UserError, match=r"^elsewhere was lost, one failure more than restarts=1 allows in all: it hangs$"
    ):
        supervisor.lost("elsewhere", "it hangs")
    assert supervisor.children == []


def python(name: str, code: str) -> Program:
    return Program(name, [sys.executable, "-c", code])


def wait_for_end(supervisor: Supervisor) -> None:
    assert soon(lambda: supervisor.ended)

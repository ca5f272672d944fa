"""The commands that launchers start."""

import subprocess
import sys

import pytest

from nemo_style_rlhf.launch.program import ACTOR_PYTHON, ROOT, SERVER_PYTHON, Program, server, trainer


def test_a_trainer_runs_in_the_actors_environment(tmp_path):
    program = trainer("train_sft", tmp_path, "trainer.max_steps=2", env={"A": "1"})
    words = [str(ACTOR_PYTHON), "trainers/train_sft.py", f"run.output_dir={tmp_path}", "trainer.max_steps=2"]
    assert program.command == words and program.name == "train_sft" and program.env == {"A": "1"}
    assert program.ready_file is None


def test_a_server_runs_in_its_own_environment_on_a_free_port(tmp_path):
    program = server("serve_ppo_critic", tmp_path, "server.port=5")
    where = [f"run.output_dir={tmp_path}", "server.port=0", f"server.ready_file={program.ready_file}"]
    assert program.command == [str(SERVER_PYTHON), "servers/serve_ppo_critic.py", *where, "server.port=5"]


@pytest.mark.parametrize("program", [trainer, server])
def test_a_folder_may_have_any_name(program, tmp_path):
    folder = tmp_path / "it's [a=b], é"
    assert f'run.output_dir="{folder}"' in program("any", folder).command


def test_torchrun_starts_several_ranks():
    command = Program("two", ["python", "script.py", "a=1"], ranks=2).command
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert command == ["python", *torchrun, "script.py", "a=1"]


@pytest.mark.parametrize("program", [trainer, server])
def test_the_environments_are_those_that_make_builds(program, tmp_path):
    assert (ROOT / program("any", tmp_path).command[0]).is_file()


def test_it_loads_no_library():
    code = "import sys, nemo_style_rlhf.launch.local; assert not {'torch', 'hydra', 'numpy', 'psutil'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

"""A run on one host: what its programs are told, which deaths are forgiven, what ends the run."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.ppo_local import TOKEN, make_programs
from nemo_style_rlhf.launch.starting import PART
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.local import PPOLocalConfig
from tests.support.paths import ACTOR_PYTHON, ROOT, SERVER_PYTHON

pytestmark = pytest.mark.slow("each starts a launcher and its programs")

CRITIC = "import time\nprint('serving', flush=True)\ntime.sleep(600)"
WAITS = "import signal, time\nsignal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})\ntime.sleep(600)"
DIES = "raise SystemExit(3)"
MISTAKE = "import sys\nsys.exit(print('error: model.path=x: no') or 2)"
STEPS = """
import sys, time
from pathlib import Path
step = int(Path("step").read_text()) if Path("step").exists() else 0
print(f"12:00:00 INFO resumed from step {step}" if step else "no warning")
for step in range(step + 1, 8):
    Path("step").write_text(str(step))
    print(f"PPO {step}/7  reward 0.5", flush=True)
    time.sleep(0.3)
    if step < 7:
        sys.exit(1)
"""
WARNS = """
import time
print("  of no message\\n12:00:00 WARNING step 3: too high. Samples of this step:\\n  1.5 | w1", flush=True)
time.sleep(0.5)
print("  2.5 | w2\\n12:00:00 INFO of no interest\\n  nor this\\nnor that\\n  nor that", flush=True)
"""
INTERRUPTED = """
import signal, sys, time
def stop(*_):
    print("stopped in step 3; step 2 is saved; the same command goes on", flush=True)
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
print("PPO 2/7  reward 0.5", flush=True)
time.sleep(600)
"""


def config(folder: Path, *words: str) -> PPOLocalConfig:
    models = ["model.path=policy", "critic.model.path=reward", "data.train_path=rows.jsonl", "critic.run.output_dir=''"]
    return build(PPOLocalConfig, OmegaConf.from_dotlist([f"run.output_dir={folder}", *models, *words]))


def test_the_token_is_in_the_environment_alone_and_new_at_every_start(tmp_path):
    tokens = []
    for _ in range(2):
        critic, actor = make_programs(config(tmp_path), tmp_path)
        assert critic.env[TOKEN] == actor.env[TOKEN] and len(actor.env[TOKEN]) == 64
        tokens.append(actor.env[TOKEN])
        files = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
        assert actor.env[TOKEN] not in files + str(critic.argv) + str(actor.argv)
    assert tokens[0] != tokens[1]


def test_both_get_their_part_of_the_configuration_and_the_same_address(tmp_path):
    words = ["critic.engine.optim.lr=0.5", "engine.optim.lr=0.25"]
    given = config(tmp_path, *words, "ranks=2", "devices=[2,3]", "critic_devices=[1]")
    given.data.prompt_template = "${no interpolation} {prompt}"
    programs = make_programs(given, tmp_path)
    critic, actor = (yaml.safe_load((tmp_path / "configs" / f"{each.name}.yaml").read_text()) for each in programs)
    assert critic["engine"]["optim"]["lr"] == 0.5 and actor["engine"]["optim"]["lr"] == 0.25 and "critic" not in actor
    assert critic["server"]["port"] == actor["remote_critic_rm"]["port"] > 0
    assert critic["run"]["output_dir"] == str(tmp_path / "critic")
    assert OmegaConf.create(actor).data.prompt_template == "${no interpolation} {prompt}"
    assert [each.argv[0] for each in programs] == [str(SERVER_PYTHON), str(ACTOR_PYTHON)]
    assert [each.ranks for each in programs] == [1, 2]
    assert [each.env["CUDA_VISIBLE_DEVICES"] for each in programs] == ["1", "2,3"]


def test_without_pytriton_one_environment_holds_both(tmp_path):
    programs = make_programs(config(tmp_path, "critic.server.backend=native"), tmp_path)
    assert [each.argv[0] for each in programs] == [str(ACTOR_PYTHON), str(ACTOR_PYTHON)]


@pytest.mark.parametrize(("estimator", "enabled"), [("gae", True), ("grpo", False), ("reinforce", False)])
def test_the_server_has_a_critic_if_the_algorithm_has_one(estimator, enabled, tmp_path):
    words = [f"algorithm.advantage_estimator={estimator}", "algorithm.samples_per_prompt=2"]
    make_programs(config(tmp_path, *words), tmp_path)
    critic = yaml.safe_load((tmp_path / "configs" / "critic.yaml").read_text())
    assert critic["value_model"]["enabled"] == enabled


def test_a_critic_that_the_algorithm_needs_is_not_left_out(tmp_path):
    with pytest.raises(
        UserError, match=r"^critic\.value_model\.enabled=false but algorithm\.advantage_estimator=gae needs"
    ):
        config(tmp_path, "critic.value_model.enabled=false")


def test_no_server_is_started_for_an_actor_that_asks_none(tmp_path):
    words = [
        "algorithm.advantage_estimator=reinforce",
        "reward.critic.weight=0",
        "reward.function.weight=1",
        "critic.model.path=''",
    ]
    (actor,) = make_programs(config(tmp_path, *words, "reward.function.path=reward.py"), tmp_path)
    assert actor.name == "actor" and actor.env[PART] == "actor"


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("critic.model.path=''", "critic.model.path is not set: give the reward model"),
        ("remote_critic_rm.port=9", "remote_critic_rm.port is set but this command starts a critic server"),
        ("critic.server.host=0.0.0.0", "critic.server.host is set but this command starts a critic server"),
        ("critic.engine.zero_stage=9", "critic: engine.zero_stage=9 is not possible"),
        ("restarts=-1", "restarts=-1 is not possible"),
    ],
)
def test_a_mistake_is_one_sentence(word, sentence, tmp_path):
    with pytest.raises(UserError, match=f"^{sentence}"):
        config(tmp_path, word)


def start(folder: Path, *programs: str, restarts: int = 3) -> subprocess.Popen:
    """A launcher of Python ``programs``, the actor last, in ``folder``."""
    launcher = f"""
import sys
from pathlib import Path
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch import interrupt
from nemo_style_rlhf.launch.local import ProgramFailed
from nemo_style_rlhf.launch.ppo_run import PPORun
from nemo_style_rlhf.launch.program import Program
interrupt.listen()
folder = Path({str(folder)!r})
names = ["critic", "actor"][-{len(programs)}:]
programs = [Program(name, [sys.executable, "-c", code], folder=folder) for name, code in zip(names, {programs!r})]
run = PPORun(programs, folder, restarts={restarts})
try:
    code = run.to_its_end()
except (UserError, ProgramFailed) as error:
    code = f"{{type(error).__name__}}: {{error}}"
finally:
    run.close()
sys.exit(code)
"""
    return subprocess.Popen(
        [sys.executable, "-c", launcher], cwd=ROOT, stderr=subprocess.PIPE, text=True, process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def test_a_warning_is_shown_with_the_samples_under_it_and_nothing_else(tmp_path):
    launcher = start(tmp_path, CRITIC, WARNS)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, said
    shown = [line for line in said.splitlines() if line.startswith("actor: ") and "log in" not in line]
    assert shown == [
        "actor: 12:00:00 WARNING step 3: too high. Samples of this step:",
        "actor:   1.5 | w1",
        "actor:   2.5 | w2",
    ]


def test_an_actor_that_dies_after_every_step_comes_to_its_end(tmp_path):
    launcher = start(tmp_path, CRITIC, STEPS, restarts=1)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, said
    assert said.count("actor ended with exit code 1 and is started again (1 of 1 restarts before the next step)") == 6
    assert "actor: 12:00:00 INFO resumed from step 6" in said and "no warning" not in said
    assert [line for line in said.splitlines() if line.startswith("PPO ")][-1] == "PPO 7/7  reward 0.5"


def test_deaths_without_a_step_between_them_end_the_run(tmp_path):
    launcher = start(tmp_path, DIES, WAITS, restarts=2)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and said.count("is started again") == 2
    assert (
        "critic ended with exit code 3, one failure more than restarts=2 allows before the next step; the end of "
        in said
    )


@pytest.mark.parametrize(
    ("programs", "whose"), [((MISTAKE, INTERRUPTED), "critic: "), ((CRITIC, MISTAKE), ""), ((MISTAKE,), "")]
)
def test_a_users_mistake_is_not_repeated(programs, whose, tmp_path):
    launcher = start(tmp_path, *programs)
    _, said = launcher.communicate(timeout=60)
    assert said.endswith(f"UserError: {whose}model.path=x: no\n") and "started again" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_passes_on_that_it_is_to_end_and_says_what_the_actor_said(number, tmp_path):
    launcher = start(tmp_path, CRITIC, INTERRUPTED)
    while "PPO 2/7" not in ((tmp_path / "actor.log").read_text() if (tmp_path / "actor.log").exists() else ""):
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert said.splitlines()[-1] == "stopped in step 3; step 2 is saved; the same command goes on", said

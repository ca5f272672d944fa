"""A low limit on open files is raised where it can be, and else refused in one sentence, by every entry point."""

import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ENTRY_POINTS, ROOT, own_python

pytestmark = pytest.mark.slow("each starts a program")

RUN = ["run.output_dir=outputs", "model.path=owner/model", "data.train_path=owner/rows", "run.device=cpu"]
ARGUMENTS = {
    "evaluate": ["run.output_dir=outputs", "checkpoints=[owner/model]", "data.path=owner/rows"],
    "inspect_data": ["model.path=owner/model", "data.train_path=owner/rows"],
    "plan": ["model.path=owner/model", "critic.model.path=owner/reward", "data.train_path=owner/rows"],
    "train_ppo_local": [*RUN, "critic.model.path=owner/reward"],
    "train_ppo_ray": [*RUN, "critic.model.path=owner/reward"],
    "try_reward": [
        "reward=remote_critic_rm",
        "reward.critic.weight=0",
        "reward.endpoints.weight=1",
        "reward.endpoints.urls=[http://host]",
        "data.path=owner/rows",
    ],
    "serve_ppo_critic": ["run.output_dir=outputs", "model.path=owner/model"],
    "serve_engine": ["model.path=owner/model"],
    "serve_reward_model": ["model.path=owner/model"],
}
STARTS = [
    script
    for script in ENTRY_POINTS
    if script.stem not in ("merge_lora", "export_checkpoint", "export_rollouts", "watch")
]
PROGRAM = """
import resource
from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.schema.plan import PlanConfig

@entry_point(PlanConfig)
def main(config):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))

main()
"""


@pytest.mark.parametrize("script", STARTS, ids=lambda script: script.name)
def test_too_low_a_limit_is_refused_before_anything_is_loaded(script: Path, tmp_path: Path) -> None:
    words = [own_python(script), str(script), *ARGUMENTS.get(script.stem, RUN)]
    command = ["bash", "-c", 'ulimit -n 64; cd "$0" && exec "$@"', str(ROOT), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == "", done.stdout + done.stderr
    sentence = (
        "error: a process may open 64 files here and 512 are needed: start it from a shell with `ulimit -n 4096`\n"
    )
    assert done.stderr == sentence
    assert not (ROOT / "outputs").joinpath(".owner_trainer.json").exists()


@pytest.mark.parametrize(
    ("limits", "then"),
    [
        ("ulimit -Sn 64; ulimit -Hn 2000", "2000 2000"),
        ("ulimit -Sn 511; ulimit -Hn 10000", "4096 10000"),
        ("ulimit -Sn 512; ulimit -Hn 10000", "512 10000"),
        ("ulimit -n 9000", "9000 9000"),
    ],
)
def test_a_low_limit_that_may_be_raised_is_raised(limits: str, then: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [str(ROOT / ".venv-actor/bin/python"), str(tmp_path / "program.py"), *ARGUMENTS["plan"], "run.device=cpu"]
    done = subprocess.run(
        ["bash", "-c", f'{limits}; cd "$0" && exec "$@"', str(ROOT), *words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, f"{then}\n"), done.stderr

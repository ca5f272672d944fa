"""What must be true of every entry point's process before it does anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import HydraException

from nemo_style_rlhf import programs
from nemo_style_rlhf.launch.composition import compose, presets
from nemo_style_rlhf.launch.usage import help_text
from nemo_style_rlhf.schema.programs import PROGRAMS
from tests.support.paths import ENTRY_POINTS, ROOT, own_python


@pytest.mark.slow("starts a program for each script")
@pytest.mark.skipif(sys.platform != "linux", reason="libgomp")
def test_they_set_up_openmp_and_load_no_torch() -> None:
    """``--help``, a refused key and a reward function's processes do not wait for it; libgomp, which comes with it, prints the
    settings it was loaded with: threads spin for microseconds only."""
    # vLLM, where an earlier test has used it, leaves an LD_PRELOAD that loads a libgomp before Python starts.
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "LD_PRELOAD")}
    code = (
        "import runpy, sys\n"
        f"for script in {[str(script) for script in ENTRY_POINTS]}:\n"
        "    runpy.run_path(script, run_name='imported')\n"
        "    assert 'torch' not in sys.modules, script\n"
        "import torch"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**environment, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0 and "GOMP_SPINCOUNT = '1000'" in result.stderr, result.stderr


@pytest.mark.slow("starts a program for each script")
@pytest.mark.parametrize("option", [["--config-name=sft"], ["--config-name", "sft"]])
def test_options_may_stand_between_overrides(option: list[str]) -> None:
    words = ["run.seed=1", *option, "run.seed=2", "~tracking", "--cfg", "job", "run.device=cpu"]
    command = [sys.executable, ROOT / "trainers" / "train_sft.py", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "  seed: 2\n" in result.stdout and "  device: cpu\n" in result.stdout


@pytest.mark.parametrize("script", ["train_ppo_actor", "train_ppo_local", "train_ppo_ray", "plan"])
def test_help_lists_every_preset_that_a_program_takes(script: str) -> None:
    """Hydra's own list would have the critic server's recipes, too."""
    told = help_text(script, getattr(programs, script).__doc__, dry_run="", sweeps=False)
    listed = told.partition("Presets (group=name):\n")[2].partition("\n\n")[0]
    groups: dict[str, list[str]] = {}
    for path in sorted((ROOT / "conf").glob("*/*.yaml")):
        groups.setdefault(path.parent.name, []).append(path.stem)
    assert groups.pop("experiment_critic")
    if script != "train_ppo_ray":
        assert groups.pop("placement")
    if script != "train_ppo_actor":
        groups["critic.engine"] = groups["engine"]
    assert sorted(listed.splitlines()) == sorted(f"  {group}: {', '.join(names)}" for group, names in groups.items())


def test_every_program_tells_its_purpose_its_usage_and_its_presets() -> None:
    for script, (name, _) in PROGRAMS.items():
        told = help_text(script, getattr(programs, script).__doc__, dry_run="", sweeps=False)
        assert f"/{script}.py " in told.split("\n\n")[1] and told.endswith("\n$CONFIG"), script
        assert told.count("$") == 1, f"{script}: a template has only $CONFIG"
        assert all(f"\n  {group}: " in told for group in presets(name)), script


@pytest.mark.parametrize("name", ["ppo_local", "ppo_ray", "plan"])
def test_a_preset_of_the_critic_server_is_written_like_its_keys(name: str) -> None:
    own, critics = "engine=zero3", "critic.engine=zero2"
    config = compose(name, [own, critics, "critic.model.packing=true"])
    assert (config.engine.zero_stage, config.critic.engine.zero_stage) == (3, 2)
    assert compose("ppo_critic", ["engine=zero2"]).engine == config.critic.engine
    with pytest.raises(HydraException, match="engine/zero9"):
        compose(name, ["critic.engine=zero9"])


RESTARTED = """
import os
from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.schema.plan import PlanConfig

@entry_point(PlanConfig)
def main(config):
    print(os.getpid(), config.run.seed, os.environ.get("GLIBC_TUNABLES"))

main()
"""


@pytest.mark.slow("starts a program for each script")
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has these caches")
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, "glibc.malloc.tcache_count=0"),
        ("glibc.malloc.check=0", "glibc.malloc.check=0:glibc.malloc.tcache_count=0"),
        ("glibc.malloc.tcache_count=3", "glibc.malloc.tcache_count=3"),
    ],
)
def test_on_a_cpu_it_starts_itself_again_without_thread_caches(tmp_path, given: str | None, kept: str) -> None:
    """As the same process and with its overrides, unless the user has set them."""
    script = tmp_path / "program.py"
    script.write_text(RESTARTED)
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    if given:
        environment["GLIBC_TUNABLES"] = given
    arguments = [
        "model.path=policy",
        "critic.model.path=reward",
        "data.train_path=owner/prompts",
        "run.device=cpu",
        "run.seed=7",
    ]
    program = subprocess.Popen(
        [sys.executable, script, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    printed, _ = program.communicate()
    assert printed == f"{program.pid} 7 {kept}\n"


@pytest.mark.slow("starts a program for each script")
@pytest.mark.parametrize("kind", ["the other environment", "a plain Python"])
@pytest.mark.parametrize("script", ENTRY_POINTS, ids=lambda script: script.name)
def test_a_wrong_interpreter_is_named_with_the_right_one(script: Path, kind: str) -> None:
    (other,) = {".venv-server/bin/python", ".venv-actor/bin/python"} - {own_python(script)}
    # Without site-packages, and so without this package: the script finds it beside itself.
    command = [ROOT / other] if kind == "the other environment" else [ROOT / own_python(script), "-S"]
    script = script.relative_to(ROOT)
    done = subprocess.run([*command, script, "--help"], cwd=ROOT, env={}, capture_output=True, text=True)
    if kind == "the other environment" and script.name in ("serve_ppo_critic.py", "serve_reward_model.py"):
        assert done.returncode == 0  # with server.backend=native they run there, too
        return
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {command[0]} has no ") and f", which {script} needs: " in line
    assert f": use {own_python(ROOT / script)} {script} (`make envs` builds" in line


@pytest.mark.slow("starts a program for each script")
@pytest.mark.parametrize("script", ENTRY_POINTS, ids=lambda script: script.name)
def test_its_own_interpreter_starts_it_from_anywhere(script: Path, tmp_path: Path) -> None:
    command = [ROOT / own_python(script), script, "--help"]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert done.returncode == 0 and script.name in done.stdout, done.stderr

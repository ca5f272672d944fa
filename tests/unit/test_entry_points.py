"""What must be true of every entry point's process before it does anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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


@pytest.mark.parametrize("name", ["ppo_actor", "ppo_local", "ppo_ray", "plan"])
def test_help_lists_every_preset_that_a_program_takes(name: str) -> None:
    """Hydra's own list would have the critic server's recipes, too."""
    template = yaml.safe_load((ROOT / "conf" / f"{name}.yaml").read_text())["hydra"]["help"]["template"]
    listed = template.partition("Presets (group=name):\n")[2].partition("\n\n")[0]
    presets: dict[str, list[str]] = {}
    for path in sorted((ROOT / "conf").glob("*/*.yaml"), key=lambda path: (path.parent.name, path.stem)):
        presets.setdefault(path.parent.name, []).append(path.stem)
    assert presets.pop("experiment_critic")
    if name != "ppo_ray":
        assert presets.pop("placement")
    assert listed.splitlines() == [f"{group}: {', '.join(names)}" for group, names in presets.items()]


RESTARTED = """
import os
from nemo_style_rlhf.launch.entry import entry_point
from nemo_style_rlhf.schema.plan import PlanConfig

@entry_point(PlanConfig, config_name="plan")
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

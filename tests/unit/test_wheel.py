"""The package as a wheel installs it: its commands run in any folder, without the repository."""

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ENTRY_POINTS, ROOT, own_python

SOURCES = [
    "setup.py",
    "MANIFEST.in",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "requirements",
    "nemo_style_rlhf",
    "conf",
    "servers",
    "trainers",
]
OFFLINE = ["--no-deps", "--no-index", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the source distribution, as an index serves it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # the build leaves folders of its own
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pack = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", pack, folder], cwd=source, check=True, capture_output=True)
    (packed,) = folder.glob("*.tar.gz")
    build = [sys.executable, "-m", "pip", "wheel", packed, "--no-build-isolation", *OFFLINE, "--wheel-dir", folder]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def commands(wheel: Path) -> Path:
    """The folder of commands of a virtual environment that holds nothing but the wheel."""
    environment = wheel.parent / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    install = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", *OFFLINE, wheel]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    return environment / "bin"


def run(command: list, folder: Path, libraries: str) -> subprocess.CompletedProcess[str]:
    """With the libraries of one of the repository's environments. Their link to the repository is a .pth file, which Python
    heeds in its own site-packages alone."""
    (site_packages,) = (ROOT / libraries).glob("lib/python3.*/site-packages")
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(site_packages)}, capture_output=True, text=True)


def command_of(script: Path) -> str:
    return f"nsr-{script.stem.replace('_', '-')}"


@pytest.mark.slow("builds a wheel")
def test_the_wheel_holds_the_whole_configuration_tree(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("nemo_style_rlhf/conf/")}
    files = (path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*") if path.is_file())
    assert packed == {f"nemo_style_rlhf/{path}" for path in files}


def test_the_wheel_holds_the_whole_page_of_watch(wheel: Path) -> None:
    page = "nemo_style_rlhf/watch/page"
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(f"{page}/")}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / page).rglob("*") if path.is_file()}
    assert packed == files and f"{page}/vendor/uPlot.LICENSE" in files


def test_the_chart_library_is_the_published_one() -> None:
    source = (ROOT / "nemo_style_rlhf" / "watch" / "page" / "vendor" / "uPlot.js").read_text()
    published, note, _ = source.rpartition("// Above, byte for byte, ")
    digest = re.search(r"sha256 (\w{64})", source)
    assert note and digest and hashlib.sha256(published.encode()).hexdigest() == digest[1]


@pytest.mark.more
def test_nothing_of_the_repository_is_used(commands: Path, tmp_path: Path) -> None:
    code = "from nemo_style_rlhf.launch.composition import CONF_DIR; print(CONF_DIR)"
    shown = run([commands / "python", "-c", code], tmp_path, ".venv-actor")
    assert Path(shown.stdout).is_relative_to(commands.parent), shown.stderr


@pytest.mark.more
@pytest.mark.parametrize("script", ENTRY_POINTS, ids=lambda script: script.name)
def test_every_script_has_a_command(script: Path, commands: Path, tmp_path: Path) -> None:
    libraries, other = sorted([".venv-actor", ".venv-server"], reverse=".venv-server" in own_python(script))
    command = command_of(script)
    shown = run([commands / command, "--help"], tmp_path, libraries)
    assert shown.returncode == 0 and command in shown.stdout, shown.stderr
    refused = run([commands / command, "--help"], tmp_path, other)
    if script.name in ("serve_ppo_critic.py", "serve_reward_model.py"):
        assert refused.returncode == 0  # with server.backend=native they run there, too
        return
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: {commands / 'python'} has no ") and f", which {command} needs: " in line
    assert f"nemo_style_rlhf[{libraries.removeprefix('.venv-')}]" in line


@pytest.mark.more
@pytest.mark.parametrize(
    ("script", "preset"),
    [("trainers/train_ppo_actor.py", ["algorithm=grpo"]), ("servers/serve_ppo_critic.py", [])],
)
def test_a_command_composes_what_its_script_does(
    script: str, preset: list[str], commands: Path, tmp_path: Path
) -> None:
    words = ["run.seed=7", *preset, "--cfg", "job"]
    python = own_python(ROOT / script)
    libraries = python.partition("/")[0]
    composed = run([commands / command_of(Path(script)), *words], tmp_path, libraries)
    assert composed.returncode == 0 and "  seed: 7\n" in composed.stdout, composed.stderr
    assert composed.stdout == run([ROOT / python, ROOT / script, *words], tmp_path, libraries).stdout


COMPLETION = """
PATH={commands}:$PATH
eval "$(nsr-train-ppo-actor -sc install=bash)"
for COMP_LINE in "nsr-train-ppo-actor algorithm.max_st" "nsr-train-ppo-actor experiment=gsm"; do
    COMP_POINT=${{#COMP_LINE}} COMP_CWORD=1 COMPREPLY=()
    hydra_bash_completion
    echo "${{COMPREPLY[@]}}"
done
"""


@pytest.mark.more
def test_the_shell_completes_keys_and_presets(commands: Path, tmp_path: Path) -> None:
    shown = run(["bash", "-c", COMPLETION.format(commands=commands)], tmp_path, ".venv-actor")
    assert shown.stdout.splitlines() == ["algorithm.max_steps=", "experiment=gsm8k_qwen05b"], shown.stderr


@pytest.mark.more
@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (["model.path=./none"], "error: model.path=./none: there is no such folder"),
        (["trainer.max_step=3"], "error: configuration key trainer.max_step: Key 'max_step' not in"),
    ],
)
def test_a_mistake_gets_its_sentence(mistake: list[str], sentence: str, commands: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    words = ["run.output_dir=out", "model.path=gpt2", "data.train_path=rows.jsonl", *mistake]
    done = run([commands / "nsr-train-sft", *words], tmp_path, ".venv-actor")
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(sentence)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]

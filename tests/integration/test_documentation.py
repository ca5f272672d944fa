"""Every command and Python block of README.md, its neighbors and docs/ runs, or is composed where it needs what no test has."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from string import Template

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_style_rlhf.launch.composition import compose
from nemo_style_rlhf.ppo.recording import step_samples
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.programs import PROGRAMS
from nemo_style_rlhf.tracking.rollout_files import write_step
from tests.support import warm
from tests.support.models import save_policy, save_reward_model
from tests.support.pages import blocks, commands_of
from tests.support.paths import ROOT
from tests.support.processes import start_server
from tests.support.rollouts import collect

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
RUN_ELSEWHERE = {
    ("pipeline.md", ""): "tests/integration/test_pipeline.py, in the order of the page",
    ("watching.md", "watch.py outputs/*"): "tests/integration/test_watch_runs.py, in a browser",
    ("protocol.md", "curl "): "tests/integration/test_critic_docs.py, against a server",
    ("protocol.md", "import numpy"): "tests/integration/test_critic_docs.py, against a server",
}
"""Blocks that other tests run, by page and a part of their text."""
COMPOSED = {
    r"remote_critic_rm\.host=critic-host": "a second host, by the name in its certificate",
    r"serve_engine\.py": "a second host, which an actor told how to sample; tests/integration/test_engine_runs.py has both",
    r"experiment=": "models and data of the hub; tests/integration/test_experiments.py has tiny ones",
    r"train_ppo_ray\.py": "a Ray cluster; tests/cluster/test_ppo_ray.py has one",
    r"reward=judge": "a language model as judge; tests/integration/test_judge.py starts one",
}
"""Commands that are composed and checked, by what they need."""
PARSED = {
    r"^sbatch ": "a cluster; tests/cluster submits the same scripts to a Slurm",
    r"^\.venv-actor/bin/ray (start|get-auth-token)": "a Ray cluster; tests/cluster/ray_nodes.py starts one",
    r" -m ": "hours; tests/unit/launch/test_sweep.py sweeps",
    r"^eval ": "an installed command; tests/unit/test_wheel.py completes its keys",
    r"^(docker|enroot|apptainer) ": "a container engine",
    r"^pip (wheel|install) ": "a package index; tests/unit/test_wheel.py builds and installs the wheel",
    r"^make ": "minutes to hours; a test below finds the target",
    r"^(export |mounts=)": "nothing: it sets what the commands after it read",
}
"""Commands that are parsed, by what they need."""


def documented(language: str) -> Iterator[tuple[Path, str]]:
    """Every page and block of a language but those that other tests run."""
    for page in PAGES:
        for block in blocks(page, language):
            if not any(page.name == name and part in block for name, part in RUN_ELSEWHERE):
                yield page, block


def needs(command: str, table: dict[str, str]) -> list[str]:
    return [pattern for pattern in table if re.search(pattern, command)]


COMMANDS = list(dict.fromkeys(command for _, block in documented("bash") for command in commands_of(block)))
RUN = [command for command in COMMANDS if ".venv-" in command and not needs(command, COMPOSED | PARSED)]
FIRST = {command.split()[1]: command for command in reversed(RUN)}
"""The first command of each script."""
SECRETS = [command for command in COMMANDS if re.match(r"head -c|openssl", command)]
"""They make what other commands read: critic.token, critic.key and critic.crt."""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> dict[str, str]:
    """Values of the variables in the pages' commands."""
    folder = tmp_path_factory.mktemp("world")
    prompts = [
        {"prompt": f"w{i % 60} w{i // 60}", "response": "w3 w4", "chosen": " w5 w6", "rejected": " w7"}
        for i in range(600)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    rows = str(folder / "rows.jsonl")
    function = folder / "reward.py"
    function.write_text(
        "def reward_func(queries, prompts, labels):\n    return [float(len(query)) for query in queries]\n"
    )
    (folder / "rubric.txt").write_text("{prompt}{response}")
    long = {"max_position_embeddings": 4096}
    policy, reward = str(save_policy(folder / "policy", **long)), str(save_reward_model(folder / "reward", **long))
    return {
        "POLICY": policy, "BASE_MODEL": policy, "REWARD_MODEL": reward, "PROMPTS": rows, "SFT_ROWS": rows,
        "PREFERENCE_PAIRS": rows, "NODE_A": "127.0.0.1", "PWD": str(ROOT),
        "REWARD_FUNCTION": str(function), "RUBRIC": str(folder / "rubric.txt"), "OUTPUT_DIR": str(folder / "outputs"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def secrets(tmp_path_factory) -> Path:
    """A folder with token, key and certificate."""
    folder = tmp_path_factory.mktemp("secrets")
    for command in SECRETS:
        subprocess.run(["bash", "-c", command], cwd=folder, check=True, capture_output=True)
    assert {path.name for path in folder.iterdir()} == {"critic.token", "critic.key", "critic.crt"}
    assert oct((folder / "critic.token").stat().st_mode & 0o777) == "0o600"
    return folder


@pytest.fixture(scope="module")
def token(secrets: Path) -> Path:
    return secrets / "critic.token"


@pytest.fixture(scope="module")
def checkpoint(world, tmp_path_factory) -> Path:
    """A checkpoint of a supervised stage."""
    folder = tmp_path_factory.mktemp("sft")
    given = [f"run.output_dir={folder}", f"model.path={world['BASE_MODEL']}", f"data.train_path={world['SFT_ROWS']}"]
    short = ["trainer.max_steps=1", "trainer.batch_size=2", "checkpoint.save_interval=1"]
    done = warm.run(["trainers/train_sft.py", *given, *short], timeout=300)
    assert done.returncode == 0, done.stderr
    return next((folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def port(world, token, tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    server, port = start_server(folder, f"model.path={world['REWARD_MODEL']}", f"server.token.token_file={token}")
    yield port
    server.terminate()


@pytest.fixture(scope="module")
def started_cold() -> set[str]:
    """Scripts that a test has started from nothing; further commands of theirs are forked."""
    return set()


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Those of a run's fifth step, in the output folder that the pages name."""
    experience = collect()
    folder = tmp_path / "ppo" / "rollouts"
    folder.mkdir(parents=True)
    write_step(folder, step_samples(5, experience, None), ["text"] * len(experience.rollouts))
    return folder


def words_of(command: str, world: dict[str, str], secrets: Path, outputs: Path) -> list[str]:
    """The words of a command, with files that exist and outputs in a folder of their own."""
    text = (
        Template(command)
        .substitute(world)
        .replace("outputs/", f"{outputs}/")
        .replace("@rubric.txt", f"@{world['RUBRIC']}")
    )
    return [re.sub(r"=critic\.(token|key|crt)$", rf"={secrets}/critic.\1", word) for word in shlex.split(text)]


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=[] if command in FIRST.values() else pytest.mark.more) for command in RUN],
)
def test_a_command_runs(command, world, port, secrets, token, started_cold, request, tmp_path):
    """As it stands, but in a folder of its own and, where it would train for hours, with --dry-run."""
    if "$CHECKPOINT" in command:
        world = {**world, "CHECKPOINT": str(request.getfixturevalue("checkpoint"))}
    if re.search("export_rollouts|watch", command):
        request.getfixturevalue("samples")
    words = words_of(command, world, secrets, tmp_path)
    trains = not re.search("inspect_data|try_reward|export|--help", command)
    if trains and "--dry-run" not in words and "--cfg" not in words:
        words.append("--dry-run")
    if "train_ppo_actor" in command:
        overrides = [f"remote_critic_rm.port={port}", "generation.kv_cache_gib=0.1", "checkpoint.keep_last=1"]
        overrides += [] if "token_file" in command else [f"remote_critic_rm.token.token_file={token}"]
        after_script = words.index("trainers/train_ppo_actor.py") + 1
        words[after_script:after_script] = overrides
    if "train_ppo_local" in command and "--help" not in words:
        words.append("generation.kv_cache_gib=0.1")
    python, script = ROOT / words[0], words[1]
    if script in started_cold and python in warm.LIBRARIES:
        done = warm.run(words[1:], python=python, timeout=300)
    else:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
        started_cold.add(script)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_other_command_says_what_it_needs(world, secrets, tmp_path):
    """It is composed, or parsed: each has one line of the tables, and each line has a command."""
    others = [command for command in COMMANDS if command not in {*RUN, *SECRETS}]
    found = {command: needs(command, COMPOSED | PARSED) for command in others}
    assert {command: patterns for command, patterns in found.items() if len(patterns) != 1} == {}
    assert {pattern for patterns in found.values() for pattern in patterns} == {*COMPOSED, *PARSED}
    for command in others:
        subprocess.run(["bash", "-n", "-c", command], check=True)
        for path in re.findall(r"\b(?:trainers|servers|slurm|tools)/[\w.]+", command):
            assert (ROOT / path).is_file(), command
        if needs(command, COMPOSED):
            checked(words_of(command, world, secrets, tmp_path))


def checked(words: list[str]) -> object:
    """The configuration of a command, in which its keys exist and fit together."""
    after_script = 1 + next(index for index, word in enumerate(words) if word.endswith(".py"))
    name, schema = PROGRAMS[Path(words[after_script - 1]).stem]
    overrides = [word for word in words[after_script:] if not word.startswith("--")]
    if name == "engine":
        overrides.append("model.path=owner/policy")  # as in the file that the actor writes
    return build(schema, compose(name, overrides))


def test_the_python_of_the_pages_runs():
    """One block: a reward function, as a user would write it."""
    ((page, block),) = documented("python")
    assert page.name == "own-reward.md"
    scope: dict = {}
    exec(block, scope)
    assert scope["reward_func"](["1 + 1 = 2", "1 + 1 = 3"], ["1 + 1 ="] * 2, ["= 2"] * 2) == [1.0, 0.0]


def test_the_yaml_of_the_pages_is_a_configuration(world):
    ((page, block),) = documented("yaml")
    assert page.name == "data.md"
    given = {"run": {"output_dir": "out"}, "model": {"path": world["POLICY"]}, **yaml.safe_load(block)}
    config = build(PPOActorConfig, OmegaConf.create(given))
    assert [source.weight for source in config.data.mixture] == [3, 1]


def test_no_block_is_of_another_language():
    languages = {name for page in PAGES for name in re.findall(r"^```(\S+)$", page.read_text(), re.MULTILINE)}
    assert languages == {"bash", "python", "yaml", "{toctree}"}
    assert all(any(part in block for block in _all_blocks(name)) for name, part in RUN_ELSEWHERE)


def _all_blocks(name: str) -> list[str]:
    (page,) = (page for page in PAGES if page.name == name)
    return blocks(page, "bash") + blocks(page, "python")


def test_the_make_targets_of_the_documentation_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {
        match for page in PAGES for match in re.findall(r"(?:^|`)make ([a-z][a-z-]*)\b", page.read_text(), re.MULTILINE)
    }
    assert {"envs", "quickstart", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_every_key_that_a_page_names_exists():
    """Where a page translates others' keys, those of the last column."""
    known = {key for _, schema in PROGRAMS.values() for key in _keys(OmegaConf.structured(schema))}
    sections = {key.split(".")[0] for key in known}
    for page in PAGES:
        lines = page.read_text().splitlines()
        if page.name == "migrating.md":
            lines = [cell for line in lines if line.startswith("|") for cell in line.split("|")[2:]]
        for name in re.findall(r"`([a-z_]+\.[a-z_.]+)(?:=[^`]*)?`", "\n".join(lines)):
            if name.split(".")[0] in sections and Path(name).suffix not in {".log", ".token", ".yaml", ".py", ".json"}:
                assert name in known, f"{page.name} names {name}"


def _keys(config, prefix=""):
    for key in config:
        yield prefix + key
        child = OmegaConf.to_container(config).get(key)
        if isinstance(child, dict):
            yield from _keys(config[key], f"{prefix}{key}.")


def test_links_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_test_that_a_page_names_exists():
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    functions = {name for text in files.values() for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    for page in PAGES:
        text = page.read_text()
        assert set(re.findall(r"\btests/[\w/]+\.py", text)) <= files.keys(), page.name
        assert set(re.findall(r"`(test_\w+)`", text)) <= functions, page.name


def test_the_readme_is_short_and_its_numbers_are_measured():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    measured = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("benchmarks", "asynchronous"))
    measured += (ROOT / "requirements" / "peer-trl.txt").read_text()  # the version beside which PPO was measured
    numbers = re.findall(r"\d+\.[\d.]*\d", text.partition("## Why this one")[2].partition("## Read on")[0])
    assert len(numbers) > 15
    assert [number for number in numbers if number not in measured] == []


def test_every_setting_of_the_batch_scripts_is_documented():
    page = (ROOT / "docs" / "cluster.md").read_text()
    for script in (ROOT / "slurm").glob("*.sh"):
        settings = re.findall(r'"\$\{([A-Z_]+):=', script.read_text())
        assert len(settings) >= 5
        for name in settings:
            assert f"`{name}`" in page, f"{script.name}: {name}"

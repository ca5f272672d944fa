"""Every command in README.md and docs/ is run; every key they name exists."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from string import Template

import pytest
from omegaconf import OmegaConf

from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.critic import PPOCriticConfig
from nemo_style_rlhf.schema.evaluation import EvaluationConfig
from nemo_style_rlhf.schema.inspection import InspectDataConfig
from nemo_style_rlhf.schema.local import PPOLocalConfig
from nemo_style_rlhf.schema.plan import PlanConfig
from nemo_style_rlhf.schema.reward_server import RewardServerProcessConfig
from nemo_style_rlhf.schema.try_reward import TryRewardConfig
from tests.support import warm
from tests.support.models import save_policy, save_reward_model
from tests.support.pages import commands
from tests.support.paths import ROOT
from tests.support.processes import start_server

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


README = commands(ROOT / "README.md")
STARTS_PYTHON = [command for command in README if ".venv-" in command]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> dict[str, str]:
    """What the README's variables stand for."""
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
    long = {"max_position_embeddings": 4096}
    policy, reward = str(save_policy(folder / "policy", **long)), str(save_reward_model(folder / "reward", **long))
    return {
        "POLICY": policy, "BASE_MODEL": policy, "REWARD_MODEL": reward, "PROMPTS": rows, "SFT_ROWS": rows,
        "PREFERENCE_PAIRS": rows, "NODE_A": "127.0.0.1",
        "REWARD_FUNCTION": str(function),
    }  # fmt: skip


@pytest.fixture(scope="module")
def token(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("token") / "critic.token"
    make_token = next(command for command in README if "critic.token" in command and "urandom" in command)
    subprocess.run(["bash", "-c", make_token], cwd=path.parent, check=True)
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    return path


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


@pytest.mark.parametrize("command", STARTS_PYTHON)
def test_a_command_of_the_readme_runs(command, world, port, token, started_cold, tmp_path):
    """As it stands, but in a folder of its own and, where it would train for hours, with --dry-run."""
    words = shlex.split(Template(command).substitute(world))
    words = [word.replace("=critic.token", f"={token}").replace("outputs/", f"{tmp_path}/") for word in words]
    trains = "inspect_data" not in command and "try_reward" not in command
    if trains and "--dry-run" not in words and "--cfg" not in words:
        words.append("--dry-run")
    if "train_ppo_actor" in command:
        overrides = [f"remote_critic_rm.port={port}", "generation.kv_cache_gib=0.1", "checkpoint.keep_last=1"]
        overrides += [] if "token_file" in command else [f"remote_critic_rm.token.token_file={token}"]
        after_script = words.index("trainers/train_ppo_actor.py") + 1
        words[after_script:after_script] = overrides
    if "train_ppo_local" in command:
        words.append("generation.kv_cache_gib=0.1")
    python, script = ROOT / words[0], words[1]
    if script in started_cold and python in warm.LIBRARIES:
        done = warm.run(words[1:], python=python, timeout=180)
    else:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=180)
        started_cold.add(script)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_make_targets_of_the_documentation_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {
        match for page in PAGES for match in re.findall(r"(?:^|`)make ([a-z][a-z-]*)\b", page.read_text(), re.MULTILINE)
    }
    assert {"envs", "quickstart", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_every_key_of_the_right_hand_columns_exists():
    known = {}
    for schema in (
        PPOActorConfig,
        PPOCriticConfig,
        RewardServerProcessConfig,
        EvaluationConfig,
        TryRewardConfig,
        InspectDataConfig,
        PlanConfig,
        PPOLocalConfig,
    ):
        known.update(dict.fromkeys(_keys(OmegaConf.structured(schema))))
    sections = {key.split(".")[0] for key in known}
    for page in (ROOT / "README.md", ROOT / "docs" / "migrating.md"):
        cells = [cell for line in page.read_text().splitlines() if line.startswith("|") for cell in line.split("|")[2:]]
        cells = cells if page.name == "migrating.md" else [line for line in page.read_text().splitlines()]
        for name in re.findall(r"`([a-z_]+\.[a-z_.]+)(?:=[^`]*)?`", "\n".join(cells)):
            if name.split(".")[0] in sections:
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


def test_every_setting_of_the_batch_scripts_is_documented():
    page = (ROOT / "docs" / "cluster.md").read_text()
    for script in (ROOT / "slurm").glob("*.sh"):
        settings = re.findall(r'"\$\{([A-Z_]+):=', script.read_text())
        assert len(settings) >= 5
        for name in settings:
            assert f"`{name}`" in page, f"{script.name}: {name}"

"""The user's own paths: what is missing is said before anything heavy is loaded, and hub names stay hub names."""

import re
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.evaluation import EvaluationConfig
from nemo_style_rlhf.schema.paths import data_source, function_file, model_folder, require_paths
from nemo_style_rlhf.schema.plan import PlanConfig
from nemo_style_rlhf.schema.reward import FunctionRewardConfig
from nemo_style_rlhf.schema.supervised import SFTConfig
from tests.support.paths import ROOT, own_python


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder `models/good` with a config, one without, and rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "good").mkdir(parents=True)
    (tmp_path / "models" / "good" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text("")


@pytest.mark.parametrize("path", ["gpt2", "models/on-the-hub", "models/good", "./models/good", "models/good/", "empty"])
def test_folders_and_hub_names_pass(path: str) -> None:
    """An owner on the hub may have the name of a folder here."""
    assert model_folder(path) is None


@pytest.mark.parametrize(
    "path", ["./none", "../none", "/none", "~/none", "a/b/c", "models/good/none", "none/", "org/name/"]
)
def test_what_looks_like_a_path_must_be_there(path: str) -> None:
    assert "no such folder" in str(model_folder(path))


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    assert "no config.json" in str(model_folder("./empty"))
    assert "no config.json" in str(model_folder(str(tmp_path / "empty")))


@pytest.mark.parametrize("path", ["models/good", "./empty", "empty"])
def test_an_adapter_is_named_as_one_with_the_command_that_merges_it(path: str, tmp_path: Path) -> None:
    (tmp_path / path / "adapter_config.json").write_text("{}")
    (tmp_path / path / "adapter_model.safetensors").touch()
    assert "trainers/merge_lora.py ADAPTER TARGET" in str(model_folder(path))
    (tmp_path / path / "model.safetensors").touch()
    assert "merge_lora" not in str(model_folder(path))


def test_data_is_a_file_a_folder_or_a_hub_name() -> None:
    assert [data_source(path) for path in ("rows.jsonl", "models", "owner/name", "owner/name:train[10%]")] == [None] * 4
    for path in ("none.jsonl", "owner/none.parquet", "./none", "a/b/c"):
        assert "does not exist" in str(data_source(path))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def reward_func(queries): ...", None),
        ("async def reward_func(queries): ...", None),
        ("if True:\n    reward_func = print", None),
        ("from os import path as reward_func", None),
        ("from os.path import *", None),
        ("def make():\n    global reward_func\n    reward_func = print\nmake()", None),
        ("globals()['reward_func'] = print", None),
        ("def other(): ...", "no function reward_func, set reward.function.name"),
        ("class Rewards:\n    def reward_func(queries): ...", "no function reward_func, set reward.function.name"),
        ("def other():\n    reward_func = 1", "no function reward_func, set reward.function.name"),
        ("def reward_func(:", "SyntaxError: .* \\(line 1\\)"),
        ("a = 1\nb = = 2", "SyntaxError: .* \\(line 2\\)"),
        ("\0", "cannot contain null bytes"),
    ],
)
def test_a_reward_function_is_read_but_not_run(source: str, problem: str | None, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(source)
    found = function_file(str(path), FunctionRewardConfig(path=str(path)))
    assert found is None if problem is None else re.search(problem, str(found))


def problems(schema: type, *given: str) -> list[str]:
    config = build(schema, OmegaConf.from_dotlist(["run.output_dir=out", *given]))
    try:
        require_paths(config)
    except UserError as error:
        return [problem.partition("=")[0] for problem in str(error).split("; ")]
    return []


def test_all_that_is_missing_is_said_at_once_and_what_is_not_read_may_be_missing() -> None:
    good = ["model.path=models/good", "data.train_path=rows.jsonl"]
    tokens = [f"{section}.token.token_file=none" for section in ("remote_critic_rm", "reward.server")]
    assert problems(PPOActorConfig, *good, "data.val_path=null") == []
    both = ["reward.function.path=none.py", *tokens]
    assert problems(PPOActorConfig, *good, *both) == ["remote_critic_rm.token.token_file"]
    used = ["reward.critic.weight=0", "reward.function.weight=1", "algorithm.advantage_estimator=grpo"]
    in_use = problems(PPOActorConfig, *good, *both, *used, "reward.server.weight=1", "algorithm.samples_per_prompt=2")
    assert in_use == ["reward.server.token.token_file", "reward.function.path"]
    assert problems(PPOActorConfig, "model.path=./none", "data.train_path=no.jsonl", "data.val_path=no.parquet") == [
        "model.path", "data.train_path", "data.val_path"
    ]  # fmt: skip
    assert problems(SFTConfig, *good, "model.init=random", "model.config_path=models/none.json") == [
        "model.config_path"
    ]
    assert problems(
        EvaluationConfig, "checkpoints=[a:models/good,b:./models/none,gpt2,models/on-the-hub,none/]", "data.path=no.jsonl",
        "reward.model.path=./none",
    ) == ["checkpoints", "checkpoints", "data.path", "reward.model.path"]  # fmt: skip
    unread = [
        "reward.model.path=./none",
        "reward.model.weight=0",
        "reward.function.path=./none",
        "reward.function.weight=0",
    ]
    assert problems(EvaluationConfig, "checkpoints=[gpt2]", "data.path=rows.jsonl", *unread) == []


def test_a_plan_for_another_machine_needs_models_and_prompts_only() -> None:
    given = ["model.path=models/good", "critic.run.output_dir=out", "critic.server.token.token_file=none"]
    actors = ["remote_critic_rm.token.token_file=none", "reward.function.path=none", "reward.function.weight=1"]
    assert problems(PlanConfig, *given, *actors, "critic.model.path=''", "data.train_path=''") == []
    assert problems(PlanConfig, *given, *actors, "critic.model.path=./none", "data.train_path=no.jsonl") == [
        "data.train_path", "critic.model.path"
    ]  # fmt: skip


def test_a_missing_vllm_is_named_with_the_documented_commands() -> None:
    """The server's Python has none. A plan and generation=hf do not need it."""
    code = (
        "from omegaconf import OmegaConf\n"
        "from nemo_style_rlhf.errors import UserError\n"
        "from nemo_style_rlhf.schema import actor, plan; from nemo_style_rlhf.schema.base import build\n"
        "from nemo_style_rlhf.schema.paths import require_paths\n"
        "words = ['run.output_dir=out', 'model.path=gpt2', 'data.train_path=owner/rows']\n"
        "critic = ['critic.run.output_dir=out', 'critic.model.path=gpt2']\n"
        "require_paths(build(plan.PlanConfig, OmegaConf.from_dotlist([*words, *critic])))\n"
        "require_paths(build(actor.PPOActorConfig, OmegaConf.from_dotlist([*words, 'generation.backend=hf'])))\n"
        "try:\n    require_paths(build(actor.PPOActorConfig, OmegaConf.from_dotlist(words)))\n"
        "except UserError as error:\n    print(error)"
    )
    python = ROOT / ".venv-server/bin/python"
    done = subprocess.run([python, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.stdout.startswith(f"generation.backend=vllm: {python} has no vllm: "), done.stderr
    (command,) = re.findall("`(.*?)`", done.stdout)
    assert command in (ROOT / "docs" / "getting-started.md").read_text()


MISSING = {
    "trainers/train_ppo_actor.py": ["run.output_dir=out", "model.path=./none", "data.train_path=none.jsonl"],
    "trainers/train_ppo_local.py": [
        "run.output_dir=out",
        "model.path=gpt2",
        "critic.model.path=./none",
        "data.train_path=none.jsonl",
    ],
    "trainers/train_ppo_ray.py": [
        "run.output_dir=out",
        "model.path=gpt2",
        "critic.model.path=./none",
        "data.train_path=none.jsonl",
    ],
    "trainers/train_sft.py": ["run.output_dir=out", "model.path=./none", "data.train_path=none.jsonl"],
    "trainers/train_dpo.py": ["run.output_dir=out", "model.path=./none", "data.train_path=none.jsonl"],
    "trainers/evaluate.py": ["run.output_dir=out", "checkpoints=[./none]", "data.path=none.jsonl"],
    "trainers/inspect_data.py": ["model.path=./none", "data.train_path=none.jsonl"],
    "trainers/plan.py": ["model.path=./none", "data.train_path=none.jsonl"],
    "servers/serve_ppo_critic.py": ["run.output_dir=out", "model.path=./none"],
    "servers/serve_reward_model.py": ["model.path=./none"],
    "servers/serve_engine.py": ["model.path=./none"],
}


@pytest.mark.slow("starts a program for each script")
@pytest.mark.parametrize("script", MISSING)
def test_an_entry_point_says_it_before_torch_is_loaded(script: str) -> None:
    code = (
        f"import runpy, sys; sys.argv = {[script, *MISSING[script]]!r}\n"
        f"try:\n    runpy.run_path({str(ROOT / script)!r}, run_name='__main__')\n"
        "finally:\n    print(sorted({'torch', 'numpy', 'transformers'} & sys.modules.keys()))"
    )
    python = ROOT / own_python(ROOT / script)
    done = subprocess.run([python, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert "=./none: there is no such folder" in line
    assert ("none.jsonl: it does not exist" in line) == ("none.jsonl" in str(MISSING[script]))

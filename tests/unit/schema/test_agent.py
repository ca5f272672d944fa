"""The keys of environments."""

import pytest

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.agent import AgentConfig
from nemo_style_rlhf.schema.base import validate
from nemo_style_rlhf.schema.paths import require_paths


@pytest.mark.parametrize(
    "key, value",
    [
        ("workers", 0),
        ("episodes_per_worker", 0),
        ("max_turns", 0),
        ("max_tokens", 0),
        ("step_timeout_s", 0.0),
        ("episode_timeout_s", -1.0),
        ("attempts", 0),
        ("history", "forget"),
    ],
)
def test_a_value_that_is_not_possible_is_named(key: str, value: object) -> None:
    validate(AgentConfig(), "agent.")
    with pytest.raises(UserError, match=f"^agent.{key}={value} is not possible: expected "):
        validate(AgentConfig(**{key: value}), "agent.")  # type: ignore[arg-type]


def test_the_file_must_have_the_class(tmp_path) -> None:
    path = tmp_path / "my_env.py"
    with pytest.raises(UserError, match="there is no such file, it must be the environment's Python file"):
        require_paths(AgentConfig(path=str(path)))
    path.write_text("class Mine: ...")
    require_paths(AgentConfig(path=str(path), name="Mine"))
    with pytest.raises(UserError, match=r"it has no class Environment, set agent\.name to the one it has"):
        require_paths(AgentConfig(path=str(path)))


ENVIRONMENT = "from nemo_style_rlhf.agents.environment import Environment, Observation\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (ENVIRONMENT + "class Game(Environment):\n    async def reset(self, task): ...", "Game"),
        (ENVIRONMENT + "class Board: ...\nclass Game(Environment): ...", "Game"),
        (ENVIRONMENT + "class Base(Environment): ...\nclass Game(Base):\n    def step(self, action): ...", "Game"),
        ("from nemo_style_rlhf.agents import environment as e\nclass Game(e.Environment): ...", "Game"),
        ("from nemo_style_rlhf.agents.environment import Environment as E\nclass Game(E): ...", "Game"),
        ("class Duck:\n    async def execute(self, task, policy): ...", "Duck"),
        ("class Environment:\n    async def step(self, action): ...", "Environment"),
    ],
)
def test_without_a_name_the_files_only_environment_is_taken(text: str, name: str, tmp_path) -> None:
    (tmp_path / "my_env.py").write_text(text)
    config = AgentConfig(path=str(tmp_path / "my_env.py"))
    require_paths(config)
    assert config.name == name


def test_of_several_environments_one_must_be_named(tmp_path) -> None:
    path = tmp_path / "my_env.py"
    path.write_text(ENVIRONMENT + "class One(Environment): ...\nclass Two(Environment): ...")
    with pytest.raises(UserError, match=r"it has the environments One, Two, set agent\.name to one of them"):
        require_paths(AgentConfig(path=str(path)))
    require_paths(AgentConfig(path=str(path), name="Two"))

"""A setting that nothing reads is named at the start, with the reason."""

import ast
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from omegaconf import OmegaConf

from nemo_style_rlhf import programs
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.base import build, idle_settings
from nemo_style_rlhf.schema.critic import PPOCriticConfig
from nemo_style_rlhf.schema.evaluation import EvaluationConfig
from nemo_style_rlhf.schema.local import PPOLocalConfig
from nemo_style_rlhf.schema.supervised import SFTConfig
from tests.support.paths import ROOT

ACTOR = ["run.output_dir=x", "model.path=x", "data.train_path=x"]
LOCAL = [*ACTOR, "critic.model.path=x", "critic.run.output_dir=''"]
SFT = [*ACTOR]
CRITIC = ["run.output_dir=x", "model.path=x"]
EVALUATION = ["run.output_dir=x", "checkpoints=[x]", "data.path=x"]
GIVEN = [
    (PPOActorConfig, ACTOR, ["agent.workers=4"], ["agent.workers=4 does nothing: there is no agent"]),
    (PPOActorConfig, ACTOR, ["agent.token.token_file=x"], ["agent.token.token_file=x does nothing: there is no agent"]),
    (PPOActorConfig, ACTOR, ["agent.path=x.py", "agent.workers=4", "agent.attempts=2"], []),
    (PPOActorConfig, ACTOR, ["agent.path=x.py", "agent.programs=4"], ["agent.programs=4 does nothing: it is for programs"]),
    (PPOActorConfig, ACTOR, ["agent.command=[x]", "agent.programs=4", "agent.max_tokens=9"], []),
    (PPOActorConfig, ACTOR, ["agent.command=[x]", "agent.history=template"], ["agent.history=template does nothing"]),
    (PPOActorConfig, ACTOR, ["generation.engines.threads=2"], ["generation.engines.threads=2 does nothing: gen"]),
    (PPOActorConfig, ACTOR, ["generation.engines.threads=2", "generation.engines.count=1"], []),
    (PPOActorConfig, ACTOR, ["generation.backend=hf", "generation.kv_cache_gib=1", "generation.max_num_seqs=8"],
     ["generation.kv_cache_gib=1.0 does nothing: it is vLLM's"]),
    (PPOActorConfig, ACTOR, ["generation.kv_cache_gib=1"], []),
    (PPOActorConfig, ACTOR, ["algorithm.max_steps=3", "algorithm.critic_warmup_steps=3"],
     ["algorithm.critic_warmup_steps=3 leaves no step to the policy: algorithm.max_steps=3"]),
    (PPOActorConfig, ACTOR, ["algorithm.max_steps=4", "algorithm.critic_warmup_steps=3"], []),
    (PPOActorConfig, ACTOR, ["algorithm.advantage_estimator=reinforce", "checkpoint.export_critic=true"],
     ["checkpoint.export_critic=True does nothing: algorithm.advantage_estimator=reinforce has no critic"]),
    (PPOActorConfig, ACTOR, ["checkpoint.export_critic=true"], []),
    (PPOCriticConfig, CRITIC, ["value_model.path=x", "value_model.enabled=false"],
     ["value_model.path=x does nothing: there is no critic"]),
    (PPOCriticConfig, CRITIC, ["value_model.path=x"], []),
    (PPOLocalConfig, LOCAL, ["agent.workers=4"], ["agent.workers=4 does nothing: there is no agent"]),
    (SFTConfig, SFT, ["tracking.rollouts.every=2"], ["tracking.rollouts.every=2 does nothing: a supervised stage"]),
    (SFTConfig, SFT, ["tracking.tensorboard=true"], []),
    (EvaluationConfig, EVALUATION, ["generation.backend=hf", "generation.enforce_eager=false"],
     ["generation.enforce_eager=False does nothing: it is vLLM's"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "needed", "given", "said"), GIVEN, ids=lambda value: str(value)[:60])
def test_it_is_named_with_the_reason(schema: type, needed: list[str], given: list[str], said: list[str]) -> None:
    found = list(idle_settings(build(schema, OmegaConf.from_dotlist([*needed, *given]))))
    assert len(found) == len(said), found
    assert all(sentence.startswith(beginning) for sentence, beginning in zip(found, said, strict=True)), found


def test_a_server_without_anything_to_serve_is_refused() -> None:
    from nemo_style_rlhf.errors import UserError

    words = [*CRITIC, "value_model.enabled=false", "reward_model.combine_rm_and_critic_server=false"]
    with pytest.raises(
        UserError, match=r"^reward_model\.combine_rm_and_critic_server=False is not possible: expected true with"
    ):
        build(PPOCriticConfig, OmegaConf.from_dotlist(words))


@pytest.mark.parametrize(
    "given",
    [
        "optim.betas=[0.9,1]",
        "optim.betas=[-1,0.9]",
        "optim.eps=0",
        "optim.weight_decay=-1",
        "scheduler.min_lr_ratio=1.5",
    ],
)
def test_an_impossible_value_of_the_optimizer_is_refused(given: str) -> None:
    with pytest.raises(UserError, match=r"^engine\.(optim|scheduler)\.\w+=.* is not possible: expected"):
        build(SFTConfig, OmegaConf.from_dotlist([*SFT, f"engine.{given}"]))


# --- every key of every program ---------------------------------------------------------------------------------------

HAND_ON = {"train_ppo_local", "train_ppo_ray", "plan"}
"""Programs that start others with the keys, or plan for them."""
CONSENTS = {"algorithm.allow_uncorrected"}
"""Keys that only keep ``validate`` from refusing."""


def module(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imported(tree: ast.AST) -> set[Path]:
    """Files of the package that ``tree`` imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nemo_style_rlhf"):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("nemo_style_rlhf")}
    return {path for name in names if (path := module(name)) and path.stem != "programs"}


def read_in(node: ast.AST, checks: tuple[str, ...]) -> set[str]:
    """Names of the attributes that are read in ``node``, but not in functions whose names begin as ``checks``."""
    if isinstance(node, ast.FunctionDef) and node.name.startswith(checks):
        return set()
    own = {node.attr} if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) else set()
    return own.union(*(read_in(child, checks) for child in ast.iter_child_nodes(node)))


@functools.cache
def looked_through(path: Path) -> tuple[set[Path], set[str]]:
    """The files that a file imports, and the attributes that it reads."""
    tree = ast.parse(path.read_text())
    return imported(tree), read_in(tree, ("validate", "_validate", "idle") if path.parent.name == "schema" else ())


def leaves(schema: type, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from leaves(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def change(config: Any, key: str) -> None:
    *owners, last = key.split(".")
    for owner in owners:
        config = getattr(config, owner)
    setattr(config, last, "another value")


TREE = ast.parse(Path(programs.__file__).read_text())
PROGRAMS = {
    node.name: (node, getattr(programs, node.args.args[0].annotation.id))
    for node in TREE.body
    if isinstance(node, ast.FunctionDef) and node.args.args and isinstance(node.args.args[0].annotation, ast.Name)
    and dataclasses.is_dataclass(getattr(programs, node.args.args[0].annotation.id, None))
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - HAND_ON))
def test_every_key_of_a_program_is_read_by_it_or_named(name):
    """A key counts as read if some file that the program may import reads an attribute of its name."""
    program, schema = PROGRAMS[name]
    waiting, seen, read = {*imported(program), module("nemo_style_rlhf.launch.entry")}, set(), set()
    while waiting:
        seen.add(path := waiting.pop())
        imports, attributes = looked_through(path)
        waiting |= imports - seen
        read |= attributes
    for key in leaves(schema):
        if key.rpartition(".")[2] not in read and key not in CONSENTS:
            change(config := schema(), key)
            assert any(sentence.startswith(f"{key}=") for sentence in idle_settings(config)), key

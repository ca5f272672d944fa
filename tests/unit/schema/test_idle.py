"""A setting that nothing reads is named at the start, with the reason."""

import pytest
from omegaconf import OmegaConf

from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.base import build, idle_settings
from nemo_style_rlhf.schema.evaluation import EvaluationConfig
from nemo_style_rlhf.schema.local import PPOLocalConfig
from nemo_style_rlhf.schema.supervised import SFTConfig

ACTOR = ["run.output_dir=x", "model.path=x", "data.train_path=x"]
LOCAL = [*ACTOR, "critic.model.path=x", "critic.run.output_dir=''"]
SFT = [*ACTOR]
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
    from nemo_style_rlhf.errors import UserError

    with pytest.raises(UserError, match=r"^engine\.(optim|scheduler)\.\w+=.* is not possible: expected"):
        build(SFTConfig, OmegaConf.from_dotlist([*SFT, f"engine.{given}"]))

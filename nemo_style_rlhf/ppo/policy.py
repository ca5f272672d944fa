"""The models of the actor process: loads the policy, gives it to the training engine, and makes the reference for KL."""

from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedModel

from nemo_style_rlhf.data.template_files import check_template
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine, sharded
from nemo_style_rlhf.generation.factory import require_supported
from nemo_style_rlhf.launch.starting import starting
from nemo_style_rlhf.models.loading import load_causal_lm
from nemo_style_rlhf.models.lora import add_lora
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.ppo.export import rehearse_policy
from nemo_style_rlhf.ppo.limits import max_sequence_length
from nemo_style_rlhf.ppo.recovery import Recovery
from nemo_style_rlhf.ppo.start import RunStart
from nemo_style_rlhf.rollout.reference import AdaptersOff, FrozenCopy, Reference, require_comparable
from nemo_style_rlhf.schema.actor import PPOActorConfig


@dataclass(frozen=True)
class LoadedPolicy:
    """The policy in host memory."""

    hf: PreTrainedModel
    max_length: int
    """Tokens of the longest sequence that the run may make."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.hf.config.get_text_config().vocab_size)


def load_policy(start: RunStart) -> LoadedPolicy:
    """Load the policy. Raises UserError if the run cannot sample from it, export it, compare it with its reference, or fit its
    longest sequence."""
    config, tokenizer = start.config, start.tokenizer
    starting("loading the policy")
    hf = load_causal_lm(config.model)
    require_supported(hf, config.model.path, config.generation)
    rehearse_policy(hf, config, tokenizer)
    max_length = max_sequence_length(start.whole, start.prompts, hf.config)
    require_comparable(config.model, tokenizer, hf, max_length)
    check_template(config.model.path, config.data, tokenizer)
    return LoadedPolicy(hf, max_length)


@dataclass(frozen=True)
class TrainingModels:
    engine: Engine
    """The policy in the training engine."""
    reference: Reference | None
    """The frozen policy that KL is measured against; None if nothing measures KL."""


def start_training(start: RunStart, policy: LoadedPolicy, recovery: Recovery, ranks: Ranks) -> TrainingModels:
    """Start the training engine, and load the reference. With time sharing, the engine and the critic server leave the devices
    first."""
    config, algorithm = start.config, start.config.algorithm
    add_lora(policy.hf, config.model)
    optimizer_steps = (
        algorithm.ppo_epochs * algorithm.mini_batches * (start.total_steps - algorithm.critic_warmup_steps)
    )
    engine = Engine(_policy_model(config, policy.hf), config.engine, device=start.device, total_steps=optimizer_steps)
    engine.eval()
    if config.placement.in_turns:
        engine.offload()
        recovery.clear_device()
    return TrainingModels(engine, _reference(config, engine, ranks) if config.needs_reference else None)


def _reference(config: PPOActorConfig, engine: Engine, ranks: Ranks) -> Reference:
    if not config.model.has_second_model:
        return AdaptersOff(engine, engine.module, config.engine, engine.device, ranks)
    model = _policy_model(config, load_causal_lm(config.model.reference_model))
    offload = config.model.reference == "cpu_offload" or config.placement.in_turns
    shards = config.engine.zero_stage == 3 and not offload
    forward = partial(sharded, config=config.engine, device=engine.device) if shards else None
    return FrozenCopy(model, config.engine, engine.device, ranks, cpu_offload=offload, sharded=forward)


def _policy_model(config: PPOActorConfig, hf: PreTrainedModel) -> PolicyModel:
    if config.model.gradient_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyModel(hf, temperature=config.generation.temperature, compile_backbone=config.model.compile)

"""Configuration of the actor process."""

from dataclasses import dataclass, field

from nemo_style_rlhf.algorithms.kl import KL_KINDS
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import require, require_choice
from nemo_style_rlhf.schema.common import EngineConfig, ModelConfig, RunConfig
from nemo_style_rlhf.schema.data import PromptDataConfig
from nemo_style_rlhf.schema.generation import GenerationConfig
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig
from nemo_style_rlhf.schema.tracking import TrackingConfig


@dataclass
class ActorRunConfig(RunConfig):
    resume: str = "auto"
    """auto (from the last committed checkpoint, if there is one), never (refuse an output_dir with checkpoints), or must."""

    def validate(self) -> None:
        super().validate()
        require_choice("run.resume", self.resume, ("auto", "never", "must"))


@dataclass
class PolicyConfig(ModelConfig):
    """The policy, and the frozen copy of it that KL is measured against."""

    reference: str = "copy"
    """copy (on the training device), or cpu_offload (in host memory, on the device only while it is used)."""

    def validate(self) -> None:
        super().validate()
        require_choice("model.reference", self.reference, ("copy", "cpu_offload"))


@dataclass
class PPOConfig:
    """The algorithm. Names are NeMo-Aligner's where it has one."""

    max_steps: int = -1
    """PPO steps (rollout, then update); -1: as many as max_epochs over the prompts give."""
    max_epochs: int = 1
    """Passes over the training prompts when max_steps is -1."""
    num_rollout_samples: int = 512
    """Responses per PPO step."""
    samples_per_prompt: int = 1
    """Responses to each prompt; divides num_rollout_samples."""
    ppo_epochs: int = 1
    """Passes over one rollout."""
    mini_batches: int = 1
    """Optimizer steps per pass."""
    critic_warmup_steps: int = 0
    """First PPO steps that train the critic alone: it starts as a reward model and must learn to predict returns."""
    val_check_interval: int = 0
    """PPO steps between validation rollouts, before the first step and after the last included; 0 turns them off."""
    num_val_samples: int = 128
    """Responses per validation, one each for the first prompts of data.val_path."""
    initial_policy_kl_penalty: float = 0.01
    """Coefficient of the KL penalty in the reward."""
    kl_estimator: str = "k1"
    """k1, k2, k3 or abs (NeMo-Aligner's default), for the penalty and for the metric it controls."""
    discount_factor: float = 1.0
    gae_lambda: float = 0.95
    normalize_advantages: bool = True
    """Whiten advantages over all response tokens of the rollout."""
    ratio_eps: float = 0.2
    """PPO clips the probability ratio to 1 - ratio_eps .. 1 + ratio_eps."""
    entropy_bonus: float = 0.0
    old_logprobs: str = "trainer"
    """What the ratio's denominator and the KL penalty use. trainer: the training engine's own log-probabilities, so that the
    first ratio is exactly 1 and KL at the start exactly 0 (NeMo-Aligner, OpenRLHF, verl). sampler: those the generator sampled
    with (TRL's PPOTrainer): a forward pass less per step, off by the gap between both engines."""
    truncated_samples: str = "keep"
    """Responses that reached generation.max_length: keep, mask (they train nothing) or penalise."""
    truncation_penalty: float = -1.0
    """Added to the score of truncated samples (penalise)."""

    def validate(self) -> None:
        key = "algorithm.{}".format
        require_choice(key("old_logprobs"), self.old_logprobs, ("trainer", "sampler"))
        require(
            self.max_steps >= -1 and self.max_steps != 0, key("max_steps"), self.max_steps, "a number of steps, or -1"
        )
        require(self.num_rollout_samples > 0, key("num_rollout_samples"), self.num_rollout_samples, "a number above 0")
        require(
            self.samples_per_prompt > 0 and self.num_rollout_samples % self.samples_per_prompt == 0,
            key("samples_per_prompt"), self.samples_per_prompt, f"a divisor of num_rollout_samples={self.num_rollout_samples}",
        )  # fmt: skip
        require(
            1 <= self.mini_batches <= self.num_rollout_samples,
            key("mini_batches"), self.mini_batches, f"1 to num_rollout_samples={self.num_rollout_samples}",
        )  # fmt: skip
        require(self.ppo_epochs > 0, key("ppo_epochs"), self.ppo_epochs, "a number of passes from 1 up")
        require_choice(key("kl_estimator"), self.kl_estimator, KL_KINDS)
        require_choice(key("truncated_samples"), self.truncated_samples, ("keep", "mask", "penalise"))
        require(0 <= self.gae_lambda <= 1, key("gae_lambda"), self.gae_lambda, "0 to 1")
        require(0 <= self.discount_factor <= 1, key("discount_factor"), self.discount_factor, "0 to 1")
        require(self.ratio_eps > 0, key("ratio_eps"), self.ratio_eps, "a number above 0")


@dataclass
class CheckpointConfig:
    save_interval: int = 50
    """PPO steps between checkpoints; the last step is always saved."""
    keep_last: int = 2
    """Committed checkpoints kept, on both sides."""
    export_critic: bool = False
    """At the end, write the critic as a Hugging Face sequence-classification directory, too (on the server)."""

    def validate(self) -> None:
        require(self.save_interval > 0, "checkpoint.save_interval", self.save_interval, "a number of steps above 0")
        require(self.keep_last > 0, "checkpoint.keep_last", self.keep_last, "at least 1")


@dataclass
class AuditConfig:
    """Sampler against trainer log-probabilities: shows at once that weights did not arrive."""

    max_probe_gap: float = 0.0
    """Largest |difference| on a fixed probe after a weight transfer before the run stops; 0: 1e-3 in fp32, 1.0 in bf16."""


@dataclass
class PPOActorConfig:
    """`trainers/train_ppo_actor.py`."""

    run: ActorRunConfig = field(default_factory=ActorRunConfig)
    model: PolicyConfig = field(default_factory=PolicyConfig)
    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    algorithm: PPOConfig = field(default_factory=PPOConfig)
    remote_critic_rm: RemoteCriticConfig = field(default_factory=RemoteCriticConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def validate(self) -> None:
        if self.algorithm.val_check_interval and not self.data.val_path:
            raise UserError(
                f"algorithm.val_check_interval={self.algorithm.val_check_interval} needs validation prompts: set data.val_path, "
                "or val_check_interval=0"
            )
        if self.algorithm.old_logprobs == "sampler" and not self.generation.samples_whole_distribution:
            raise UserError(
                "algorithm.old_logprobs=sampler needs log-probabilities of the whole distribution: use generation.top_p=1, "
                "top_k=0 and min_length=0, or algorithm.old_logprobs=trainer"
            )

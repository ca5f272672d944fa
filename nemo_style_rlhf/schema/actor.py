"""Configuration of the actor process."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.agent import AgentConfig
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.base import require, setting
from nemo_style_rlhf.schema.common import EngineConfig, LoRAConfig, ModelConfig, TrainerRunConfig
from nemo_style_rlhf.schema.data import PromptDataConfig
from nemo_style_rlhf.schema.generation import TrainingGenerationConfig
from nemo_style_rlhf.schema.paths import CHECK, model_folder
from nemo_style_rlhf.schema.placement import PlacementConfig
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig
from nemo_style_rlhf.schema.reward import RewardConfig
from nemo_style_rlhf.schema.tracking import TrackingConfig


@dataclass
class PolicyConfig(ModelConfig):
    """The policy, and the frozen reference that KL is measured against."""

    reference_path: str | None = field(default=None, metadata={CHECK: model_folder})
    """A reference other than the starting model: a Hugging Face directory or hub name of a model with the same tokenizer. It is
    loaded as a second model even if adapters are trained; null is the model in path."""
    reference: str = setting("copy", among=("copy", "cpu_offload"))
    """copy (stays on the training device, with engine.zero_stage=3 sharded over the ranks), or cpu_offload (in host memory, on
    the device only while it is used)."""

    def validate(self) -> None:
        super().validate()
        if self.reference != "copy" and not self.has_second_model:
            raise UserError(
                f"model.reference={self.reference} but with model.lora.rank={self.lora.rank} there is no second model to move: "
                "leave it at copy"
            )

    @property
    def has_second_model(self) -> bool:
        """True if the reference needs its own model; otherwise it is the policy with its adapters off."""
        return not self.lora.rank or bool(self.reference_path)

    @property
    def reference_model(self) -> ModelConfig:
        """The reference's checkpoint, with the policy's settings and without adapters."""
        return replace(self, path=self.reference_path or self.path, lora=LoRAConfig())


@dataclass
class CheckpointConfig:
    """Checkpoints of actor and critic, and exports."""

    save_interval: int = 50
    """PPO steps between checkpoints. The last step is always saved; -1 saves only that one."""
    keep_last: int = setting(2, gt=0, expected="at least 1")
    """Number of committed checkpoints that actor and server each keep."""
    save_hf: bool = False
    """Also write the policy into every checkpoint as a Hugging Face directory, <run.output_dir>/checkpoints/step_XXXXXX/hf."""
    max_failed_saves: int = setting(10, gt=0, expected="at least 1")
    """If a full disk refuses a checkpoint on either side, training continues and the next step tries again; this many refusals in
    a row end the run. The checkpoint of the last step, or of a run that is asked to stop, has one attempt."""
    keep_best: bool = False
    """After each validation that has the highest val_rollouts/rewards so far, export the policy to <run.output_dir>/best."""
    save_on_interrupt: bool = False
    """The first Ctrl-C ends the run after the running step, with a checkpoint; only the second one ends it at once. torchrun
    gives its ranks 30 s for that, see docs/cluster.md."""
    export_critic: bool = False
    """At the end, the server also writes the critic as a Hugging Face directory."""

    def is_due(self, step: int) -> bool:
        """True if ``save_interval`` asks for a checkpoint after ``step``."""
        return self.save_interval > 0 and step % self.save_interval == 0

    def validate(self) -> None:
        require(
            self.save_interval > 0 or self.save_interval == -1,
            "checkpoint.save_interval", self.save_interval, "a number of steps above 0, or -1 for the last step alone",
        )  # fmt: skip


@dataclass
class HealthConfig:
    """Limits of the health checks for reward hacking and collapse, in the units of their metrics; null disables a check. The last
    two have defaults, so that every run reports these failures."""

    max_response_lengths: float | None = None
    """Mean length in tokens."""
    min_response_lengths: float | None = None
    """Mean length in tokens."""
    max_repetition: float | None = None
    """Share of a response's 4-grams that occurred in it before."""
    min_distinct_2: float | None = None
    """Distinct bigrams divided by all bigrams of the rollout."""
    min_entropy: float | None = None
    """Nats per token."""
    max_init_policy_kl: float | None = None
    """Nats per token. Loads a reference policy even if nothing else needs one."""
    runaway_kl: float | None = setting(1.0, gt=0, expected="nats per token above 0, or null for no check")
    """Nats per token: the limit if max_init_policy_kl is null and a reference is loaded anyway. Healthy runs stay far below."""
    min_distinct_2_share: float | None = setting(
        0.5, gt=0, lt=1, expected="a share between 0 and 1, or null for no check"
    )
    """Lowest distinct_2, as a share of its value in the run's first rollout with enough text (see ppo/health.py)."""

    def limits(self) -> dict[str, tuple[float | None, float | None]]:
        """Map metrics of `train_rollouts/` to their (lowest, highest) allowed value; None for a bound that was not given."""
        return {
            "response_lengths": (self.min_response_lengths, self.max_response_lengths),
            "repetition": (None, self.max_repetition),
            "distinct_2": (self.min_distinct_2, None),
            "entropy": (self.min_entropy, None),
            "init_policy_kl": (None, self.max_init_policy_kl),
        }


@dataclass
class AuditConfig:
    """Checks of a run on itself: did the weights arrive, does the sampler still agree, is the reward being gamed."""

    max_probe_gap: float = 0.0
    """Largest accepted absolute difference of log-probabilities, in nats, on a fixed probe after a weight transfer; a larger one
    stops the run. 0 takes 1e-3 in fp32, 1.0 in bf16."""
    max_logprob_gap: float | None = None
    """Largest accepted mean absolute difference of the sampler's and the trainer's log-probabilities in a rollout, nats
    (train_rollouts/sampler_logprob_gap_mean)."""
    on_logprob_gap: str = setting("warn", among=("warn", "stop"))
    """warn, or stop before the update."""
    health: HealthConfig = field(default_factory=HealthConfig)
    on_unhealthy: str = setting("warn", among=("warn", "stop"))
    """warn (once, then every 10 steps while the check fails), or stop after the step's metrics are written."""


@dataclass
class PPOActorConfig:
    """Configuration of `trainers/train_ppo_actor.py`."""

    run: TrainerRunConfig = field(default_factory=TrainerRunConfig)
    model: PolicyConfig = field(default_factory=PolicyConfig)
    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    remote_critic_rm: RemoteCriticConfig = field(default_factory=RemoteCriticConfig)
    generation: TrainingGenerationConfig = field(default_factory=TrainingGenerationConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.initial_policy_kl_penalty != 0 or self.audit.health.max_init_policy_kl is not None

    @property
    def uses_critic_process(self) -> bool:
        """True if the run needs the critic process: for the values of gae, for its reward model, or for both."""
        return self.algorithm.uses_critic or self.reward.critic.weight != 0

    @property
    def values_late(self) -> bool:
        """True if the critic's values are requested when a step begins, not with the rewards. Earlier, another critic would value
        a stale sample; and an episode may have several rollouts, but has one reward."""
        return self.algorithm.uses_critic and (self.algorithm.staleness > 0 or self.agent.in_use)

    @property
    def unread(self) -> tuple[str, ...]:
        """Sections whose files this process does not read."""
        return self.reward.unread if self.uses_critic_process else (*self.reward.unread, "remote_critic_rm")

    def idle(self) -> Iterator[tuple[str, str]]:
        """See :func:`base.idle_settings`."""
        if not self.algorithm.uses_critic:
            why = f"does nothing: algorithm.advantage_estimator={self.algorithm.advantage_estimator} has no critic"
            yield "checkpoint.export_critic", why

    def validate(self) -> None:
        self.engine.validate_with(self.model)
        if self.agent.in_use:
            self._validate_agent()
        else:
            self.reward.require_source()
        if self.model.reference_path and not self.needs_reference:
            raise UserError(
                f"model.reference_path={self.model.reference_path} but nothing measures KL: set "
                "algorithm.initial_policy_kl_penalty or audit.health.max_init_policy_kl, or model.reference_path=null"
            )
        if self.algorithm.val_check_interval and not self.data.val_path:
            raise UserError(
                f"algorithm.val_check_interval={self.algorithm.val_check_interval} needs validation prompts: set data.val_path, "
                "or algorithm.val_check_interval=0"
            )
        if self.checkpoint.keep_best and not self.algorithm.val_check_interval:
            raise UserError(
                "checkpoint.keep_best=true needs validation to tell which is best: set data.val_path and "
                "algorithm.val_check_interval, or checkpoint.keep_best=false"
            )
        if "judge" in self.reward.weights and self.reward.judge.needs_label and self.data.label_key is None:
            raise UserError(
                "reward.judge.rubric holds {label}, but no row has one while data.label_key is null: set data.label_key, or take "
                "{label} out"
            )
        buffer, longest = self.algorithm.shaping.overlong_buffer, self.generation.max_length
        require(buffer <= longest, "algorithm.shaping.overlong_buffer", buffer, f"0 to generation.max_length={longest}")
        if self.algorithm.correction.kind != "none" and not self.generation.samples_whole_distribution:
            raise UserError(
                f"algorithm.correction.kind={self.algorithm.correction.kind} weighs the trainer's log-probabilities against the "
                f"sampler's, which with {self.generation.cut} are of a truncated distribution: use "
                "generation.top_p=1, generation.top_k=0 and generation.min_length=0, or algorithm.correction.kind=none"
            )
        if self.algorithm.old_logprobs == "sampler":
            self._validate_sampler_logprobs()
        if self.algorithm.staleness:
            self._validate_stale_metrics()
        if self.placement.in_turns:
            self._validate_turns()

    def _validate_turns(self) -> None:
        """Raise UserError if a setting needs two parts of the run on the devices at the same time."""
        if self.algorithm.staleness:
            raise UserError(
                f"algorithm.staleness={self.algorithm.staleness} samples beside training, which placement.share=turns does one "
                "after the other on the same devices: use algorithm.staleness=0, or placement.share=none"
            )
        if self.generation.engines.weights == "nccl":
            raise UserError(
                "generation.engines.weights=nccl with placement.share=turns would join trainer and engine on one device, which "
                "NCCL refuses: use auto or gloo"
            )

    def _validate_agent(self) -> None:
        """Raise UserError if a setting is impossible with episodes of several turns."""
        generation = self.generation
        if generation.tensor_parallel_size > 1 and not generation.engines.count:
            raise UserError(
                f"generation.tensor_parallel_size={generation.tensor_parallel_size} with agent.path needs engines: set "
                "generation.engines.count, or generation.tensor_parallel_size=1"
            )

    def _validate_stale_metrics(self) -> None:
        """Raise UserError if a limit is set for a metric that means something else for stale samples."""
        limits = {
            "audit.max_logprob_gap": (self.audit.max_logprob_gap, "the gap is how far the policy has moved since"),
            "audit.health.min_entropy": (self.audit.health.min_entropy, "only the cross entropy is known"),
        }
        for key, (limit, why) in limits.items():
            if limit is not None:
                raise UserError(
                    f"{key}={limit:g} with algorithm.staleness={self.algorithm.staleness}: of stale samples {why}: use "
                    f"{key}=null, or algorithm.staleness=0"
                )

    def _validate_sampler_logprobs(self) -> None:
        """Raise UserError if a setting needs the trainer's own log-probabilities as well as the sampler's."""
        if self.algorithm.correction.kind != "none":
            raise UserError(
                f"algorithm.correction.kind={self.algorithm.correction.kind} weighs trainer against sampler, but "
                "algorithm.old_logprobs=sampler leaves the sampler's alone: use algorithm.old_logprobs=trainer, or "
                "algorithm.correction.kind=none"
            )
        if self.audit.max_logprob_gap is not None:
            raise UserError(
                f"audit.max_logprob_gap={self.audit.max_logprob_gap:g} compares sampler and trainer, but "
                "algorithm.old_logprobs=sampler leaves the sampler's alone: use algorithm.old_logprobs=trainer, or "
                "audit.max_logprob_gap=null"
            )
        if not self.generation.samples_whole_distribution:
            raise UserError(
                "algorithm.old_logprobs=sampler needs log-probabilities of the whole distribution: use generation.top_p=1, "
                "generation.top_k=0 and generation.min_length=0, or algorithm.old_logprobs=trainer"
            )

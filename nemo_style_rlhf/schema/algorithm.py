"""The algorithm: how often, from which signal, and with which loss the policy is updated."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_style_rlhf.algorithms.names import AGGREGATIONS, CORRECTIONS, GROUP_KINDS, KL_KINDS
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import require, setting

ESTIMATORS = ("gae", "reinforce", *GROUP_KINDS)


@dataclass
class CorrectionConfig:
    """Importance weights trainer / sampler on the policy loss, see algorithms/corrections.py."""

    kind: str = setting("none", among=("none", *CORRECTIONS))
    """none, tis (clamps token weights), icepop (masks tokens outside of the bounds) or sequence_mask (masks sequences whose
    geometric mean is outside of the bounds, weights the others per token)."""
    low: float = 0.0
    """Lower bound of the weights. verl bounds tis only from above, at 2; OpenRLHF and IcePop's authors use 0.5 and 5."""
    high: float = 2.0
    """Upper bound of the weights."""

    def validate(self) -> None:
        require(
            0 <= self.low < self.high,
            "algorithm.correction.low",
            self.low,
            f"0 to below algorithm.correction.high={self.high}",
        )


@dataclass
class ShapingConfig:
    """Turns raw scores into rewards for training, in this order: normalize, clip, add penalties."""

    normalize: str = setting("none", among=("none", "running"))
    """none, or running: by mean and standard deviation of every score so far. OpenRLHF's --normalize_reward (off by default)
    differs: it uses fixed statistics stored with the reward model, as the server's reward_model.normalize_rewards does."""
    clip_low: float | None = None
    """Lower bound of a score; null for none."""
    clip_high: float | None = None
    """Upper bound of a score; null for none. Scores are clipped before any baseline or group statistics see them."""
    overlong_buffer: int = setting(0, ge=0, expected="tokens from 0 up")
    """Number of tokens before generation.max_length, or the row's own limit, over which a penalty grows (DAPO); 0 for none."""
    overlong_factor: float = 1.0
    """The penalty at full length."""

    def validate(self) -> None:
        if self.clip_low is not None and self.clip_high is not None:
            require(
                self.clip_low < self.clip_high,
                "algorithm.shaping.clip_low",
                self.clip_low,
                f"less than {self.clip_high}",
            )


@dataclass
class FilterConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): prompts that are too easy or too hard teach nothing."""

    low: float | None = None
    """Bound from below of a prompt's mean filtering score, exclusive; null for none. See `high`."""
    high: float | None = None
    """A prompt counts only if its mean filtering score is above low and below high; null leaves a side open."""
    max_rounds: int = setting(4, ge=1, expected="a number of rollouts from 1 up")
    """Maximum number of rollouts per step to find enough prompts; after that, the step uses those found."""
    oversample: float = setting(1.0, ge=1, expected="a factor from 1 up")
    """Prompts of the first of these rollouts, as a multiple of the number wanted. Prompts that count are used in the order of the
    data: the order of completion would prefer short answers."""

    @property
    def enabled(self) -> bool:
        return self.low is not None or self.high is not None

    def validate(self) -> None:
        if self.oversample > 1 and not self.enabled:
            raise UserError(
                f"algorithm.filter.oversample={self.oversample:g} has nothing to choose by: set algorithm.filter.low or high"
            )
        if self.low is not None and self.high is not None:
            require(
                self.low < self.high, "algorithm.filter.low", self.low, f"less than algorithm.filter.high={self.high}"
            )


@dataclass
class AlgorithmConfig:
    """Keys have NeMo-Aligner's names if it has the setting; docs/algorithms.md explains the presets of conf/algorithm/."""

    max_steps: int = -1
    """PPO steps (rollout, then update); -1 takes the number that max_epochs gives."""
    max_epochs: int = 1
    """Passes over the training prompts when max_steps is -1. With a filter, the prompts that it drops count, so that the run may
    end before the steps that would train all of them."""
    num_rollout_samples: int = setting(512, gt=0, expected="a number above 0")
    """Responses per PPO step."""
    samples_per_prompt: int = 1
    """Responses to each prompt; divides num_rollout_samples."""
    ppo_epochs: int = setting(1, gt=0, expected="a number above 0")
    """Passes over one rollout."""
    mini_batches: int = 1
    """Optimizer steps per pass."""
    critic_warmup_steps: int = 0
    """Number of first PPO steps that train only the critic. It starts as a reward model and must learn to predict returns."""
    staleness: int = setting(0, ge=0, expected="a number of versions from 0 up")
    """Step k trains on samples of the weights after step k - 1 - staleness, exactly. With generation.engines.count, sampling then
    runs during training (docs/asynchronous.md). 0 samples from the newest weights."""
    allow_uncorrected: bool = False
    """Permit staleness without correction: stale samples are treated as if the newest policy had made them."""
    val_check_interval: int = 0
    """PPO steps between validation rollouts. They also run before the first step and after the last; 0 turns them off."""
    num_val_samples: int = setting(128, gt=0, expected="a number above 0")
    """Prompts per validation, the first ones of data.val_path."""
    val_samples_per_prompt: int = setting(1, gt=0, expected="a number above 0")
    """Responses to each validation prompt: k of pass@k."""
    val_pass_score: float | None = None
    """Lowest reward with which a response passes in val_rollouts/pass@1 and pass@k; null if rewards have no such threshold."""

    advantage_estimator: str = setting("gae", among=ESTIMATORS)
    """gae (with a critic), reinforce (discounted rewards to go), or one that compares responses to the same prompt: grpo,
    dr_grpo, rloo, reinforce_baseline. Only gae needs a critic."""
    discount_factor: float = setting(1.0, ge=0, le=1, expected="0 to 1")
    """Gamma of GAE and of discounted returns."""
    gae_lambda: float = setting(0.95, ge=0, le=1, expected="0 to 1")
    """Lambda of GAE (arXiv 1506.02438): 1 for returns minus values, 0 for one-step errors of the critic."""
    group_eps: float = 1e-6
    """Added to grpo's standard deviation: 1e-6 in verl and slime, 1e-4 in TRL, 1e-9 in OpenRLHF."""
    normalize_advantages: bool = True
    """Whiten advantages over all response tokens of the rollout (PPO, REINFORCE++; GRPO and RLOO do not)."""
    advantage_std_norm: bool = True
    """Also divide by the standard deviation when whitening; false only subtracts the mean (OpenRLHF's no_advantage_std_norm)."""

    initial_policy_kl_penalty: float = 0.01
    """Coefficient of the KL term; with 0 no reference is loaded and KL is not measured, unless audit.health asks for it."""
    kl_in: str = setting("reward", among=("reward", "loss"))
    """reward (per token, PPO and REINFORCE++) or loss (a term of the policy loss, GRPO)."""
    kl_estimator: str = setting("k1", among=KL_KINDS)
    """k1, k2, k3 or abs (NeMo-Aligner's default), for the penalty and for the metric it controls."""
    kl_gradient: str = setting("unbiased", among=("unbiased", "plain"))
    """Gradient of the KL term with kl_in=loss. unbiased: the estimator's value with k2's gradient, the gradient of KL (verl's
    k3+). plain: the estimator's own (TRL, OpenRLHF); for k1 it is zero in expectation, for k3 it is the reversed KL's."""
    kl_target: float = setting(0.0, ge=0, expected="nats per token, or 0 for none")
    """KL per token to which the coefficient is steered (arXiv 1909.08593, section 2.2); 0 keeps the coefficient constant."""
    kl_horizon: int = setting(10000, gt=0, expected="a number of samples above 0")
    """Samples over which the coefficient moves: by up to 20 % x num_rollout_samples / kl_horizon in a step."""
    kl_min_multiplier: float = setting(0.5, gt=0, le=1, expected="a number above 0, at most 1")
    """Smallest factor that a step may apply to the coefficient; without a bound, the coefficient would turn negative if
    num_rollout_samples is more than 5 x kl_horizon."""

    ratio_eps: float = setting(0.2, gt=0, expected="a number above 0")
    """PPO clips the probability ratio to 1 - ratio_eps .. 1 + ratio_eps."""
    ratio_eps_high: float | None = setting(None, gt=0, expected="a number above 0, or null")
    """Different upper bound 1 + ratio_eps_high (DAPO's clip-higher); null takes ratio_eps."""
    dual_clip: float | None = setting(None, gt=1, expected="above 1, or null")
    """Bound of the loss at negative advantages, in units of the advantage (arXiv 1912.09729): 3 in verl; null for none."""
    ratio_level: str = setting("token", among=("token", "sequence"))
    """token, or sequence (GSPO)."""
    loss_aggregation: str = setting("token_mean", among=AGGREGATIONS)
    """token_mean (PPO, DAPO), seq_mean_token_mean (GRPO, GSPO), seq_mean_token_sum, or seq_sum_constant (Dr. GRPO: the sum over
    samples x generation.max_length)."""
    entropy_bonus: float = 0.0
    """Weight with which the loss rewards the policy's entropy, in nats per token."""
    skip_empty_steps: bool = False
    """Leave out optimizer steps in which every advantage is 0 and the loss has no KL or entropy term: Adam's momentum and weight
    decay would still move the weights. train_optim/empty_steps counts these steps either way."""
    old_logprobs: str = setting("trainer", among=("trainer", "sampler"))
    """Log-probabilities for the ratio's denominator and the KL penalty. trainer: the training engine's own, so that the first
    ratio is 1 and KL starts at 0, up to rounding (NeMo-Aligner, OpenRLHF, verl). sampler: the generator's (TRL's PPOTrainer);
    this saves a forward pass per step, but is off by the gap between both engines."""

    truncated_samples: str = setting("keep", among=("keep", "mask", "penalise", "replace"))
    """Treatment of responses that reached generation.max_length: keep, mask (no loss tokens, but they still count in their
    group), penalise (add truncation_penalty to their score) or replace (truncation_penalty becomes their score)."""
    truncation_penalty: float = -1.0
    """Added to the score of truncated samples (penalise), or their score after all other shaping (replace)."""
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)

    @property
    def uses_critic(self) -> bool:
        return self.advantage_estimator == "gae"

    @property
    def label(self) -> str:
        """The algorithm's name in progress and logs."""
        return "PPO" if self.uses_critic else self.advantage_estimator.upper()

    def validate(self) -> None:
        key = "algorithm.{}".format
        require(
            self.max_steps >= -1 and self.max_steps != 0, key("max_steps"), self.max_steps, "a number of steps, or -1"
        )
        require(
            self.samples_per_prompt > 0 and self.num_rollout_samples % self.samples_per_prompt == 0,
            key("samples_per_prompt"), self.samples_per_prompt,
            f"a divisor of algorithm.num_rollout_samples={self.num_rollout_samples}",
        )  # fmt: skip
        require(
            1 <= self.mini_batches <= self.num_rollout_samples,
            key("mini_batches"), self.mini_batches, f"1 to algorithm.num_rollout_samples={self.num_rollout_samples}",
        )  # fmt: skip
        if self.staleness:
            self._validate_staleness()
        require(
            self.kl_target == 0 or self.initial_policy_kl_penalty > 0,
            key("initial_policy_kl_penalty"), self.initial_policy_kl_penalty, "a number above 0 for kl_target to steer",
        )  # fmt: skip
        if self.advantage_estimator in GROUP_KINDS and self.samples_per_prompt < 2:
            raise UserError(
                f"algorithm.advantage_estimator={self.advantage_estimator} compares responses to one prompt: set "
                "algorithm.samples_per_prompt to 2 or more"
            )
        if not (self.advantage_std_norm or self.normalize_advantages):
            raise UserError(
                "algorithm.advantage_std_norm=false only changes whitening, which algorithm.normalize_advantages=false turns "
                "off: leave it at true, or for GRPO without its division use algorithm.advantage_estimator=dr_grpo"
            )
        if not self.uses_critic and self.critic_warmup_steps:
            raise UserError(
                f"algorithm.critic_warmup_steps={self.critic_warmup_steps} but "
                f"algorithm.advantage_estimator={self.advantage_estimator} has no critic: set it to 0"
            )

    def idle(self) -> Iterator[tuple[str, str]]:
        """See :func:`base.idle_settings`."""
        if 0 < self.max_steps <= self.critic_warmup_steps:
            yield "critic_warmup_steps", f"leaves no step to the policy: algorithm.max_steps={self.max_steps}"

    def _validate_staleness(self) -> None:
        given = f"algorithm.staleness={self.staleness}"
        if self.old_logprobs == "sampler":
            raise UserError(
                f"{given} with algorithm.old_logprobs=sampler would clip against a policy that no longer exists: use "
                "algorithm.old_logprobs=trainer"
            )
        if self.correction.kind == "none" and not self.allow_uncorrected:
            raise UserError(
                f"{given} trains on samples of older weights, which algorithm.correction.kind=none takes for the newest "
                "policy's: use algorithm.correction.kind=tis, or algorithm.allow_uncorrected=true if you mean it"
            )

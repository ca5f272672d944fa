"""The algorithm: how often, from what signal, and with which loss the policy is updated."""

from dataclasses import dataclass, field

from nemo_style_rlhf.algorithms.names import AGGREGATIONS, CORRECTIONS, GROUP_KINDS, KL_KINDS
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import require, require_choice

ESTIMATORS = ("gae", "reinforce", *GROUP_KINDS)


@dataclass
class CorrectionConfig:
    """Importance weights trainer / sampler on the policy loss, see algorithms/corrections.py."""

    kind: str = "none"
    """none, tis (token weights clamped), icepop (tokens outside of the bounds masked) or sequence_mask (sequences whose geometric
    mean is outside masked, the others weighted per token)."""
    low: float = 0.0
    """verl bounds tis from above alone, at 2; OpenRLHF has 0.5 and 5 for every kind, as IcePop's authors."""
    high: float = 2.0

    def validate(self) -> None:
        require_choice("algorithm.correction.kind", self.kind, ("none", *CORRECTIONS))
        require(0 <= self.low < self.high, "algorithm.correction.low", self.low, f"0 to below high={self.high}")


@dataclass
class ShapingConfig:
    """From raw scores to the rewards that train, in this order: normalise, clip, penalties."""

    normalize: str = "none"
    """none, or running: by mean and standard deviation of every score so far. OpenRLHF's --normalize_reward (off by default) is
    another thing, the fixed statistics stored with the reward model: the server's critic.normalize_rewards."""
    clip_low: float | None = None
    clip_high: float | None = None
    """Scores are clipped before any baseline or group statistics see them."""
    overlong_buffer: int = 0
    """The last tokens before generation.max_length, or the row's own, that cost a growing penalty (DAPO); 0 turns it off."""
    overlong_factor: float = 1.0
    """The penalty at full length."""

    def validate(self) -> None:
        require_choice("algorithm.shaping.normalize", self.normalize, ("none", "running"))
        if self.clip_low is not None and self.clip_high is not None:
            require(
                self.clip_low < self.clip_high,
                "algorithm.shaping.clip_low",
                self.clip_low,
                f"less than {self.clip_high}",
            )
        require(
            self.overlong_buffer >= 0, "algorithm.shaping.overlong_buffer", self.overlong_buffer, "tokens from 0 up"
        )


@dataclass
class FilterConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): prompts that are too easy or too hard teach nothing."""

    low: float | None = None
    high: float | None = None
    """A prompt counts only if its mean filtering score is above low and below high; null leaves a side open."""
    max_rounds: int = 4
    """Rollouts a step may take to find enough prompts; then it goes on with those it has."""

    @property
    def enabled(self) -> bool:
        return self.low is not None or self.high is not None

    def validate(self) -> None:
        require(self.max_rounds >= 1, "algorithm.filter.max_rounds", self.max_rounds, "a number of rollouts from 1 up")
        if self.low is not None and self.high is not None:
            require(self.low < self.high, "algorithm.filter.low", self.low, f"less than high={self.high}")


@dataclass
class AlgorithmConfig:
    """Names are NeMo-Aligner's where it has one; docs/algorithms.md explains the presets of conf/algorithm/."""

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
    """Prompts per validation, the first ones of data.val_path."""
    val_samples_per_prompt: int = 1
    """Responses to each of them: k of pass@k."""
    val_pass_score: float | None = None
    """The reward from which on a response counts as passed in val_rollouts/pass@1 and pass@k; null for rewards that have none."""

    advantage_estimator: str = "gae"
    """gae (with a critic), reinforce (discounted rewards to go), or from the other responses to the same prompt: grpo, dr_grpo,
    rloo, reinforce_baseline. All but gae need no critic."""
    discount_factor: float = 1.0
    gae_lambda: float = 0.95
    group_eps: float = 1e-6
    """Added to grpo's standard deviation: 1e-6 in verl and slime, 1e-4 in TRL, 1e-9 in OpenRLHF."""
    normalize_advantages: bool = True
    """Whiten advantages over all response tokens of the rollout (PPO, REINFORCE++; GRPO and RLOO do not)."""

    initial_policy_kl_penalty: float = 0.01
    """Coefficient of the KL term; with 0 no reference is loaded and KL is not measured, unless audit.signs asks for it."""
    kl_in: str = "reward"
    """reward (per token, PPO and REINFORCE++) or loss (a term of the policy loss, GRPO)."""
    kl_estimator: str = "k1"
    """k1, k2, k3 or abs (NeMo-Aligner's default), for the penalty and for the metric it controls."""
    kl_gradient: str = "unbiased"
    """Gradient of the KL term with kl_in=loss. unbiased: the estimator's value with k2's gradient, which is that of KL (verl's
    k3+); plain: the estimator's own (TRL, OpenRLHF), for k1 zero in expectation and for k3 that of the reversed KL."""
    kl_target: float = 0.0
    """KL per token the coefficient is steered to (arXiv 1909.08593, section 2.2); 0 keeps the coefficient."""
    kl_horizon: int = 10000
    """Samples over which the coefficient moves: by up to 20 % x num_rollout_samples / kl_horizon in a step."""
    kl_min_multiplier: float = 0.5
    """Least factor by which a step may lower the coefficient; without a bound it would turn negative where num_rollout_samples is
    more than 5 x kl_horizon."""

    ratio_eps: float = 0.2
    """PPO clips the probability ratio to 1 - ratio_eps .. 1 + ratio_eps."""
    ratio_eps_high: float | None = None
    """Another upper bound, DAPO's clip-higher: 1 + ratio_eps_high."""
    dual_clip: float | None = None
    """Bound of the loss where the advantage is negative, in units of it (arXiv 1912.09729): 3 in verl; null for none."""
    ratio_level: str = "token"
    """token, or sequence (GSPO)."""
    loss_aggregation: str = "token_mean"
    """token_mean (PPO, DAPO), seq_mean_token_mean (GRPO, GSPO), seq_mean_token_sum, or seq_sum_constant (Dr. GRPO: the sum over
    samples x generation.max_length)."""
    entropy_bonus: float = 0.0
    skip_empty_steps: bool = False
    """Leave out optimizer steps in which every advantage is 0 and the loss has no KL or entropy term: Adam's momentum and weight
    decay would move the weights all the same. train_optim/empty_steps counts them either way."""
    old_logprobs: str = "trainer"
    """What the ratio's denominator and the KL penalty use. trainer: the training engine's own log-probabilities, so that the
    first ratio is 1 and KL at the start 0 but for rounding (NeMo-Aligner, OpenRLHF, verl). sampler: those the generator sampled
    with (TRL's PPOTrainer): a forward pass less per step, off by the gap between both engines."""

    truncated_samples: str = "keep"
    """Responses that reached generation.max_length: keep, mask (they train nothing, but others of their group are compared with
    them), penalise (truncation_penalty is added to their score) or replace (truncation_penalty becomes their score)."""
    truncation_penalty: float = -1.0
    """What truncated samples pay (penalise), or their score after all other shaping (replace)."""
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)

    @property
    def uses_critic(self) -> bool:
        return self.advantage_estimator == "gae"

    def validate(self) -> None:
        key = "algorithm.{}".format
        for name, choices in CHOICES.items():
            require_choice(key(name), getattr(self, name), choices)
        require(
            self.max_steps >= -1 and self.max_steps != 0, key("max_steps"), self.max_steps, "a number of steps, or -1"
        )
        for name in ("num_rollout_samples", "ppo_epochs", "val_samples_per_prompt", "num_val_samples"):
            require(getattr(self, name) > 0, key(name), getattr(self, name), "a number above 0")
        require(
            self.samples_per_prompt > 0 and self.num_rollout_samples % self.samples_per_prompt == 0,
            key("samples_per_prompt"), self.samples_per_prompt, f"a divisor of num_rollout_samples={self.num_rollout_samples}",
        )  # fmt: skip
        require(
            1 <= self.mini_batches <= self.num_rollout_samples,
            key("mini_batches"), self.mini_batches, f"1 to num_rollout_samples={self.num_rollout_samples}",
        )  # fmt: skip
        require(0 <= self.gae_lambda <= 1, key("gae_lambda"), self.gae_lambda, "0 to 1")
        require(0 <= self.discount_factor <= 1, key("discount_factor"), self.discount_factor, "0 to 1")
        require(self.ratio_eps > 0, key("ratio_eps"), self.ratio_eps, "a number above 0")
        high = self.ratio_eps_high
        require(high is None or high > 0, key("ratio_eps_high"), high, "a number above 0, or null")
        require(self.dual_clip is None or self.dual_clip > 1, key("dual_clip"), self.dual_clip, "above 1, or null")
        require(self.kl_target >= 0, key("kl_target"), self.kl_target, "nats per token, or 0 for none")
        require(
            self.kl_target == 0 or self.initial_policy_kl_penalty > 0,
            key("initial_policy_kl_penalty"), self.initial_policy_kl_penalty, "a number above 0 for kl_target to steer",
        )  # fmt: skip
        require(self.kl_horizon > 0, key("kl_horizon"), self.kl_horizon, "a number of samples above 0")
        least = self.kl_min_multiplier
        require(0 < least <= 1, key("kl_min_multiplier"), least, "a number above 0, at most 1")
        if self.advantage_estimator in GROUP_KINDS and self.samples_per_prompt < 2:
            raise UserError(
                f"algorithm.advantage_estimator={self.advantage_estimator} compares responses to one prompt: set "
                "algorithm.samples_per_prompt to 2 or more"
            )
        if not self.uses_critic and self.critic_warmup_steps:
            raise UserError(
                f"algorithm.critic_warmup_steps={self.critic_warmup_steps} but "
                f"algorithm.advantage_estimator={self.advantage_estimator} has no critic: set it to 0"
            )


CHOICES = {
    "advantage_estimator": ESTIMATORS,
    "kl_estimator": KL_KINDS,
    "kl_in": ("reward", "loss"),
    "kl_gradient": ("unbiased", "plain"),
    "ratio_level": ("token", "sequence"),
    "loss_aggregation": AGGREGATIONS,
    "old_logprobs": ("trainer", "sampler"),
    "truncated_samples": ("keep", "mask", "penalise", "replace"),
}

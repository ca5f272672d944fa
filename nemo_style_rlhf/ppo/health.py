"""Health checks of a run for reward hacking and collapse of the policy."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.actor import AuditConfig, HealthConfig

log = logging.getLogger(__name__)
MIN_BIGRAMS = 256
"""Fewer bigrams say little about how much a rollout repeats itself."""
WARNING_PERIOD = 10
"""Steps between two warnings of the same health check."""
STOPPED = "the run stops, the last checkpoint holds what was learned before"
REMEDY = (
    "look at the samples of step %d (trainers/watch.py), raise algorithm.initial_policy_kl_penalty or lower engine.optim.lr, and "
    "go back to a checkpoint from before it (audit.on_unhealthy=stop ends a run here)"
)


@dataclass(frozen=True)
class Health:
    """State that the health checks keep from earlier steps. Saved in every checkpoint."""

    distinct_2: float | None = None
    """The metric of that name in the run's first rollout with at least MIN_BIGRAMS bigrams."""
    bigrams: int = 0
    """The number of bigrams in that rollout."""
    warned: dict[str, int] = field(default_factory=dict)
    """The step of the last warning, by metric."""


def check_health(
    config: AuditConfig,
    metrics: Mapping[str, float],
    health: Health,
    *,
    step: int,
    bigrams: int,
    samples: Callable[[], Sequence[str]],
    report: Callable[[str, str], object] | None = lambda metric, sentence: None,
) -> Health:
    """Run the health checks of ``config.health``, for reward hacking and collapse, on a step's rollout.

    Args:
        bigrams: number of bigrams in the responses of the rollout.
        samples: returns lines that show some of the rollout; called only if a health check fails.
        report: takes the metric and the sentence of each failure that is logged. None to log nothing: every rank finds the same
            failures.

    Returns:
        ``health`` after this step.

    Raises:
        UserError: a metric is out of bounds and ``on_unhealthy`` is stop.
    """
    if health.distinct_2 is None and bigrams >= MIN_BIGRAMS:
        health = replace(health, distinct_2=metrics["train_rollouts/distinct_2"], bigrams=bigrams)
    for name, sentence in _failed_checks(config.health, metrics, health, bigrams).items():
        due = step - health.warned.get(name, -WARNING_PERIOD) >= WARNING_PERIOD
        if due or config.on_unhealthy == "stop":
            if report is not None:
                report(name, sentence)
                lines = "".join(f"\n  {line}" for line in samples())
                log.warning("step %d: %s: %s. Samples of this step:%s", step, sentence, REMEDY % step, lines)
            health = replace(health, warned=health.warned | {name: step})
        if config.on_unhealthy == "stop":
            raise UserError(f"{sentence}; {STOPPED}")
    return health


def _failed_checks(config: HealthConfig, metrics: Mapping[str, float], health: Health, bigrams: int) -> dict[str, str]:
    """A sentence about each metric that is out of bounds, by metric."""
    found = {}
    for name, (low, high) in config.limits().items():
        if low is None and high is None:
            continue
        value = metrics[f"train_rollouts/{name}"]
        if low is not None and value < low:
            found[name] = f"train_rollouts/{name}={value:.4g} is below audit.health.min_{name}={low:g}"
        if high is not None and not value <= high:
            found[name] = f"train_rollouts/{name}={value:.4g} is above audit.health.max_{name}={high:g}"
    kl = metrics.get("train_rollouts/init_policy_kl", 0.0)  # not measured without a reference
    limit = config.runaway_kl if config.max_init_policy_kl is None else None
    if limit is not None and not kl <= limit:
        found["init_policy_kl"] = (
            f"train_rollouts/init_policy_kl={kl:.4g} is above audit.health.runaway_kl={limit:g} nats per token"
        )
    share, first = config.min_distinct_2_share, health.distinct_2
    if config.min_distinct_2 is None and share is not None and first is not None and bigrams >= MIN_BIGRAMS:
        value = metrics["train_rollouts/distinct_2"]
        # A longer text repeats more of itself. For it, the number of distinct bigrams must have fallen, not only their share.
        if value < share * first * min(1.0, health.bigrams / bigrams):
            found["distinct_2"] = (
                f"train_rollouts/distinct_2={value:.4g} is below audit.health.min_distinct_2_share={share:g} of the "
                f"{first:.4g} it began with"
            )
    return found

"""Validates the policy's versions during training, and keeps the best of them."""

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import replace

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.errors import StorageError
from nemo_style_rlhf.ppo.export import export_policy
from nemo_style_rlhf.ppo.metrics import validation_metrics
from nemo_style_rlhf.ppo.parts import Parts
from nemo_style_rlhf.ppo.reporting import Reporter
from nemo_style_rlhf.ppo.session import RunSession
from nemo_style_rlhf.rollout.producer import Producer, Timers
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.placement import GENERATE

log = logging.getLogger(__name__)
SEED_OFFSET = 2**32
"""Keeps the seeds of validation samples apart from those of training; they are the same at every validation."""


class Validation:
    """Version k of the policy is the one after step k. Every rank makes the same calls.

    Without staleness, a step ends with the validation of its own version. With it, the samples for the next steps come first, and
    the row of a validation is written when those steps are trained.
    """

    def __init__(self, config: PPOActorConfig, parts: Parts, session: RunSession, reporter: Reporter) -> None:
        self._config, self._parts, self._session, self._reporter = config, parts, session, reporter
        self._waits = config.algorithm.staleness == 0 or config.checkpoint.keep_best

    def is_due(self, version: int) -> bool:
        interval = self._config.algorithm.val_check_interval
        return interval > 0 and (version % interval == 0 or version == self._session.total_steps)

    def begin_run(self) -> None:
        """Write the row of the untrained policy, if the first step waits for it."""
        if self._session.progress.step == 0 and self._waits:
            self._write_rows([0])

    def begin_step(self, step: int) -> None:
        """Write the row of the version that sampled ``step``: its samples come first, so it is known by now."""
        self._write_rows(self._parts.queue.schedule.done_with(step))

    def end_step(self, step: int, timers: Timers) -> dict[str, float]:
        """The metrics of this step's version, if the step waits for them; the last step waits for all."""
        is_last = step == self._session.total_steps
        if is_last:
            self._write_rows(self._parts.queue.schedule.needed_after(step)[:-1])
        if not self._parts.queue.owes_validation(step) or not (self._waits or is_last):
            return {}
        metrics = self._metrics(step)
        timers.lap("validation")
        return metrics

    def end_run(self) -> None:
        """Write every row that is still missing."""
        self._write_rows(self._parts.queue.schedule.needed_after(self._session.progress.step))

    def _write_rows(self, versions: Iterable[int]) -> None:
        """Write a row for each of ``versions`` whose validation was asked for and has no row yet."""
        for version in versions:
            if self._parts.queue.owes_validation(version):
                self._reporter.row(version, self._metrics(version))

    def _metrics(self, version: int) -> dict[str, float]:
        self._parts.residency.enter(GENERATE)
        metrics = self._parts.queue.validation(version)
        reward, best = metrics["val_rollouts/rewards"], self._session.progress.best_reward
        # A validation in which every sample failed has reward NaN and is never the best.
        if self._config.checkpoint.keep_best and reward > (-math.inf if best is None else best):
            self._keep_best(version, reward)
        return metrics

    def _keep_best(self, version: int, reward: float) -> None:
        note = {"step": version, "val_rollouts/rewards": reward}
        try:
            export_policy(self._parts, self._config, "best", {"best.json": json.dumps(note)})
        except StorageError as error:  # as for a checkpoint: there may be room for the next one
            if self._parts.ranks.is_first:
                log.error("%s; training goes on, and the best so far stays that of an earlier step", error)
        else:
            self._session.progress = replace(self._session.progress, best_reward=reward)


def sample_validation(
    config: PPOActorConfig, prompts: list[Prompt], producer: Producer, version: int
) -> dict[str, float]:
    """The metrics of ``version`` on validation ``prompts``."""
    algorithm = config.algorithm
    seed, samples = config.run.seed + SEED_OFFSET, algorithm.val_samples_per_prompt
    sampled = producer.sample(prompts, samples_per_prompt=samples, run_seed=seed, version=version)
    return validation_metrics(sampled, pass_score=algorithm.val_pass_score)

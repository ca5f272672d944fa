"""Reports on a run: a row of metrics and the samples of each step, events, and warnings of its health checks."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import TypeVar

from torch import Tensor

from nemo_style_rlhf.engine.memory_use import memory
from nemo_style_rlhf.engine.utilization import GpuUtilization, by_node
from nemo_style_rlhf.ppo.health import Health, check_health
from nemo_style_rlhf.ppo.metrics import excerpts, repetition_metrics, timer_metrics
from nemo_style_rlhf.ppo.parts import Parts
from nemo_style_rlhf.ppo.recording import step_samples
from nemo_style_rlhf.ppo.session import RunSession
from nemo_style_rlhf.rollout.producer import Timers
from nemo_style_rlhf.rollout.types import Batch, Experience, Rollout, episodes
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.tracking.metrics import MetricsWriter

log = logging.getLogger(__name__)
Writer = TypeVar("Writer")


class Reporter:
    """Every rank makes the same calls; only the first writes, and its errors are raised on all."""

    def __init__(self, config: PPOActorConfig, parts: Parts, session: RunSession) -> None:
        self._config, self._parts, self._session, self._ranks = config, parts, session, parts.ranks
        self._thread = ThreadPoolExecutor(1, "metrics")
        self._repetition: Future[dict[str, float]] | None = None
        self._utilization = GpuUtilization(parts.engine.device)

    def begin_run(self, step: int) -> None:
        """Remove everything written after ``step``, where the run starts or resumes."""
        if self._parts.critic is not None:
            self._parts.critic.infer_span()  # drops the span of a step that was abandoned

        def record(writer: MetricsWriter) -> None:
            writer.rewind(step if step else -1)
            sentence = f"resumed from the checkpoint of step {step}" if step else "started"
            writer.event(step, "start", sentence, total_steps=self._session.total_steps)

        self._write(self._parts.metrics, record)
        self._write(self._parts.rollouts, lambda writer: writer.rewind(step))

    def event(self, step: int, kind: str, sentence: str) -> None:
        """Write an event after ``step``, also to the log."""
        if self._ranks.is_first:
            log.info("%s", sentence)
        self._write(self._parts.metrics, lambda writer: writer.event(step, kind, sentence))

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(self._parts.metrics, lambda writer: writer.write(step, metrics))

    def begin_step(self, rollouts: Sequence[Rollout]) -> None:
        """Begin to count how much ``rollouts`` repeat, in another thread of the first rank."""
        if self._ranks.is_first:
            self._repetition = self._thread.submit(repetition_metrics, rollouts)

    def sampling_metrics(self, batch: Batch) -> dict[str, float]:
        """Repetition, the probe's gap in nats, and the number of passes over the training prompts."""
        repetition = self._repetition
        return {
            **self._ranks.on_first(lambda: {} if repetition is None else repetition.result()),
            "train_rollouts/transfer_probe_gap": batch.probe_gap,
            "train_rollouts/epoch": self._parts.sampler.epoch(batch.data_end),
        }

    def end_step(
        self, step: int, experience: Experience, new_logprobs: Tensor | None, timers: Timers
    ) -> dict[str, float]:
        """Write the samples of ``step``, if they are due, and return the metrics that depend on clock and machine.

        Args:
            new_logprobs: see :func:`step_samples`.
        """
        if self._config.tracking.rollouts.is_due(step):
            self._write(self._parts.rollouts, lambda writer: writer.write(step_samples(step, experience, new_logprobs)))
        timers.lap("tracking")
        parts, session = self._parts, self._session
        metrics = timer_metrics(timers, experience) | {"timers/save_stall": session.save_stall}
        session.save_stall = 0.0
        metrics |= by_node(self._ranks.all_gather(self._utilization.take()))
        metrics |= parts.queue.clock_metrics() | parts.residency.clock_metrics()
        metrics |= {f"memory/actor_{name}": gib for name, gib in memory().items()}
        if parts.critic is not None and (span := parts.critic.infer_span()) is not None:
            names = ("clock/critic_infer_from", "clock/critic_infer_to", "clock/critic_infer_busy")
            metrics |= dict(zip(names, span, strict=True))
        return metrics

    def check_health(self, step: int, metrics: Mapping[str, float], experience: Experience) -> None:
        """Run the health checks; raise UserError if one fails and ``audit.on_unhealthy`` is stop."""

        def texts(row: int) -> tuple[str, str]:
            branches = episodes(experience.rollouts)[row]
            return branches[0].prompt_text, str(self._parts.tokenizer.decode(branches[-1].response_tokens))

        def report(metric: str, sentence: str) -> None:
            if self._parts.metrics is not None:
                self._parts.metrics.event(step, "health", sentence, metric=metric)

        progress = self._session.progress
        health = check_health(
            self._config.audit,
            metrics,
            Health(**progress.health),
            step=step,
            bigrams=sum(max(rollout.response_length - 1, 0) for rollout in experience.rollouts),
            samples=lambda: excerpts(experience.scores.rewards.tolist(), texts),
            report=report if self._ranks.is_first else None,
        )
        self._session.progress = replace(progress, health=asdict(health))

    def end_run(self) -> None:
        """Wait until everything is written."""
        self._write(self._parts.rollouts, lambda rollouts: rollouts.flush())
        if self._parts.metrics is not None:
            self._parts.metrics.close()

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, writer: Writer | None, write: Callable[[Writer], object]) -> None:
        """Let the first rank ``write`` with a writer that no other rank has."""
        self._ranks.on_first(lambda: None if writer is None else write(writer))

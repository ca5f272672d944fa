"""The training loop of the actor process."""

import logging
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from nemo_style_rlhf.checkpoint.owner import require_owned
from nemo_style_rlhf.checkpoint.starts import record_end
from nemo_style_rlhf.critic_service.remote_critic import CriticTrainBatch
from nemo_style_rlhf.data.sampling import mixed_seed
from nemo_style_rlhf.generation.factory import weights_for_generator
from nemo_style_rlhf.generation.transfer import OwnWeights
from nemo_style_rlhf.ppo.export import export_policy
from nemo_style_rlhf.ppo.metrics import critic_metrics, rollout_metrics
from nemo_style_rlhf.ppo.parts import Parts
from nemo_style_rlhf.ppo.reporting import Reporter
from nemo_style_rlhf.ppo.sampler_check import check_logprob_gap
from nemo_style_rlhf.ppo.session import RunSession
from nemo_style_rlhf.ppo.update import mini_batch_plan, update_actor
from nemo_style_rlhf.ppo.validation import Validation
from nemo_style_rlhf.rollout.experience import ShapingState
from nemo_style_rlhf.rollout.producer import NothingLeftError, Timers
from nemo_style_rlhf.rollout.types import Experience
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.placement import GENERATE, SCORE, TRAIN
from nemo_style_rlhf.tracking.progress import StepProgress, ppo_status

log = logging.getLogger(__name__)


class PPOTrainer:
    """Every rank runs the loop; only the first writes files and asks the server for anything but scores."""

    def __init__(self, config: PPOActorConfig, parts: Parts, session: RunSession) -> None:
        self._config, self._parts, self._session, self._ranks = config, parts, session, parts.ranks
        self._reporter = Reporter(config, parts, session)
        self._validation = Validation(config, parts, session, self._reporter)
        self._untouched = parts.experience.state
        self.metrics: dict[str, float] = {}
        """Metrics of the last step."""

    def fit(self) -> bool:
        """Run from the last committed checkpoint to the last step, and export the policy.

        Returns:
            True if the last step is done; if not, the run was told to end and has committed the step under way.

        Raises:
            Preempted: the run was told to end while no server answered.
        """
        session = self._session
        shown = self._config.tracking.progress and self._ranks.is_first
        with StepProgress(self._config.algorithm.label, session.total_steps, enabled=shown) as bar:
            while session.goes_on:
                with session.surviving():
                    if not session.restored:
                        self._restore()
                        continue
                    started = perf_counter()
                    try:
                        metrics = self.metrics = self.train_step()
                    except NothingLeftError as end:
                        self._end_here(str(end))
                        continue
                    session.end_step()
                    status = ppo_status(
                        reward=metrics["train_rollouts/rewards"],
                        kl=metrics.get("train_rollouts/init_policy_kl"),
                        tokens_per_second=metrics["timers/tokens_per_second"],
                    )
                    bar.show(session.progress.step, status, seconds_per_step=perf_counter() - started)
        if session.stopped:
            log.info(
                "step %d is committed, the run ends as it was told; the same command goes on", session.progress.step
            )
        else:
            export_policy(self._parts, self._config, "export")
            if self._ranks.is_first:
                names = ["export", "export_adapter"] if self._config.model.lora.rank else ["export"]
                output_dir = Path(self._config.run.output_dir)
                record_end(output_dir, [output_dir / name for name in names], why=session.over)
        self._reporter.end_run()
        self._ranks.barrier()  # launchers may kill every rank as soon as rank 0 exits
        return not session.stopped

    def undo(self) -> None:
        """Return the critic server and its folder to the state in which this run found them (dry runs)."""
        self._session.undo()

    def close(self) -> None:
        """End everything that runs alongside the loop, including calls under way."""
        self._reporter.close()
        for part in (self._parts.queue, self._parts.critic, self._parts.rollouts):
            if part is not None:
                part.close()

    def train_step(self) -> dict[str, float]:
        """One PPO step: sample, estimate advantages, update critic and actor, publish the actor's weights. Returns metrics.

        The critic trains in the other process while the actor trains here; its errors are raised here.
        """
        config, algorithm, parts, timers = self._config, self._config.algorithm, self._parts, Timers()
        progress = self._session.progress
        step = progress.step + 1

        with parts.residency.phase(GENERATE, timers):
            batch = parts.queue.batch(step, timers)

        with parts.residency.phase(SCORE, timers):
            self._validation.begin_step(step)
            self._reporter.begin_step(batch.rollouts)
            experience = parts.experience.build(batch, timers, critic_step=progress.critic_step)
            metrics: dict[str, float] = self._ranks.on_first(lambda: rollout_metrics(experience))
            check_logprob_gap(config.audit, metrics)
            plan = mini_batch_plan(experience, algorithm, seed=config.run.seed, step=step)
            timers.lap("metrics")
            critic_update = self._start_critic_update(experience, plan)

        with parts.residency.phase(TRAIN, timers):
            actor_metrics, new_logprobs = self._update_actor(experience, plan, step)
            timers.lap("actor_update")
            metrics |= actor_metrics
            if algorithm.uses_critic:
                metrics |= self._ranks.on_first(
                    lambda: {} if critic_update is None else critic_metrics(critic_update.result())
                )
                timers.lap("wait_for_critic")
            self._publish(step, timers, validate=self._validation.is_due(step))

        self._session.progress = replace(
            progress,
            step=step,
            data_position=batch.data_end,
            critic_step=progress.critic_step + algorithm.uses_critic,
            collector=asdict(parts.experience.state),
        )
        metrics |= self._reporter.sampling_metrics(batch)
        metrics |= self._validation.end_step(step, timers)
        require_owned()
        metrics |= self._reporter.end_step(step, experience, new_logprobs, timers)
        self._reporter.row(step, metrics)
        self._reporter.check_health(step, metrics, experience)
        return metrics

    def _start_critic_update(self, experience: Experience, plan: list[list[int]]) -> "Future[dict[str, float]] | None":
        """Start the critic's update in the other process. None without a critic, and on every rank but the first."""
        if not self._config.algorithm.uses_critic or not self._ranks.is_first:
            return None
        assert self._parts.critic is not None
        return self._parts.critic.train(critic_batch(experience, plan), step=self._session.progress.critic_step + 1)

    def _update_actor(
        self, experience: Experience, plan: list[list[int]], step: int
    ) -> tuple[dict[str, float], Tensor | None]:
        """Update the actor, unless the critic still warms up.

        Returns:
            Metrics, and the log-probabilities that the last epoch computed, [N] nats, if the step's samples are recorded.
        """
        config, ranks = self._config, self._ranks
        if step <= config.algorithm.critic_warmup_steps:
            return {}, None
        recorded = config.tracking.rollouts.is_due(step)
        new_logprobs = torch.zeros_like(experience.logprobs) if recorded else None
        metrics = update_actor(
            self._parts.engine, experience, plan, config.algorithm, ranks, max_length=config.generation.max_length,
            seed=mixed_seed(config.run.seed, step, ranks.rank), logprobs=new_logprobs,
        )  # fmt: skip
        return metrics, new_logprobs

    def _publish(self, version: int, timers: Timers, *, validate: bool) -> None:
        """Publish the engine's weights, with the log-probabilities that a generator must compute with them."""
        engine, queue = self._parts.engine, self._parts.queue
        target = self._parts.probe.target(engine)
        timers.lap("transfer_probe")
        named = engine.hf_weights(to_first=self._config.generation.engines.count > 0 or self._config.placement.in_turns)
        weights = weights_for_generator(named, engine.module.hf, self._config.generation)
        if queue.stores_weights:  # the digest covers the files
            weights = ((name, tensor.cpu()) for name, tensor in weights)
        queue.publish(OwnWeights(version, weights, target), timers, validate=validate)
        timers.lap("weight_transfer")

    def _end_here(self, why: str) -> None:
        """End the run after the last finished step."""
        step = self._session.progress.step
        sentence = f"{why}: the run ends after step {step} of {self._session.total_steps}"
        self._reporter.event(step, "over", sentence)
        self._validation.end_run()
        self._session.end_here(why)

    def _restore(self) -> None:
        """Bring every part of the run to the last checkpoint."""
        self._session.restore(self._begin)
        self._reporter.begin_run(self._session.progress.step)
        self._validation.begin_run()

    def _begin(self, ahead: Path) -> None:
        """Called when the engine holds the weights to continue from; ``ahead`` is the checkpoint's part of that name."""
        progress = self._session.progress
        self._parts.experience.state = ShapingState(**progress.collector) if progress.collector else self._untouched
        self._parts.queue.restore(progress.step, progress.data_position, ahead)
        first = progress.step == 0 and self._config.algorithm.val_check_interval > 0
        self._publish(progress.step, Timers(), validate=first)


def critic_batch(experience: Experience, plan: list[list[int]]) -> CriticTrainBatch:
    """The part of an experience that the critic trains on, in the dtypes of the protocol."""

    def split(flat: Tensor) -> list[Any]:
        return [part.numpy() for part in flat.split(experience.lengths)]

    assert experience.returns is not None and experience.scores.values is not None  # the estimator has a critic
    return CriticTrainBatch(
        sequences=split(experience.tokens.int()),
        returns=split(experience.returns.float()),
        old_values=split(experience.scores.values.float()),
        masks=split(experience.mask.float()),
        mini_batches=plan,
    )

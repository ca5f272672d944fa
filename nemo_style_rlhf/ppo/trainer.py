"""The training loop of the actor process."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.checkpoint.owner import require_owned
from nemo_style_rlhf.checkpoint.starts import record_end
from nemo_style_rlhf.critic_service.remote_critic import CriticTrainBatch, RemoteCritic
from nemo_style_rlhf.data.sampling import Sampler, mixed_seed
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.memory import memory
from nemo_style_rlhf.engine.utilization import GpuUtilization, by_node
from nemo_style_rlhf.errors import StorageError
from nemo_style_rlhf.generation.factory import weights_for_generator
from nemo_style_rlhf.generation.transfer import OwnWeights
from nemo_style_rlhf.ppo.export import export_policy
from nemo_style_rlhf.ppo.health import Health, check_health
from nemo_style_rlhf.ppo.metrics import excerpts, repetition_metrics, rollout_metrics
from nemo_style_rlhf.ppo.recording import step_samples
from nemo_style_rlhf.ppo.residency import Residency
from nemo_style_rlhf.ppo.sampler_check import Probe, check_logprob_gap
from nemo_style_rlhf.ppo.session import RunSession
from nemo_style_rlhf.ppo.update import mini_batch_plan, update_actor
from nemo_style_rlhf.rollout.experience import ExperienceBuilder, ShapingState
from nemo_style_rlhf.rollout.producer import NothingLeftError, Timers
from nemo_style_rlhf.rollout.queue import BatchQueue
from nemo_style_rlhf.rollout.types import Experience, episodes
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.placement import GENERATE, SCORE, TRAIN
from nemo_style_rlhf.tracking.metrics import MetricsWriter
from nemo_style_rlhf.tracking.progress import StepProgress, ppo_status
from nemo_style_rlhf.tracking.rollouts import RolloutWriter

log = logging.getLogger(__name__)
Part = TypeVar("Part")
OF_THE_CRITICS_CLOCK = {
    "seconds": "timers/critic_train",
    "rss_gib": "memory/critic_rss_gib",
    "cuda_peak_gib": "memory/critic_cuda_peak_gib",
}
"""Names in metrics.jsonl of what the clock and the machine decide in an answer to a train step."""


@dataclass
class Parts:
    """The components that the loop connects."""

    engine: Engine
    residency: Residency
    queue: BatchQueue
    experience: ExperienceBuilder
    critic: RemoteCritic | None
    """None if neither the algorithm nor the reward needs the critic process. All ranks query it; only the first changes it."""
    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    probe: Probe
    metrics: MetricsWriter | None
    """None except on the first rank."""
    rollouts: RolloutWriter | None
    """None except on the first rank."""
    ranks: Ranks


class PPOTrainer:
    """Every rank runs the loop; only the first writes files and asks the server for anything but scores."""

    def __init__(self, config: PPOActorConfig, parts: Parts, session: RunSession, *, total_steps: int) -> None:
        self._config = config
        self._parts = parts
        self._ranks = parts.ranks
        self._session = session
        self._total_steps = total_steps
        self._output_dir = Path(config.run.output_dir)
        self._untouched = parts.experience.state
        self.metrics: dict[str, float] = {}
        """The last step's."""
        self._beside = ThreadPoolExecutor(1, "metrics")
        self._utilization = GpuUtilization(parts.engine.device)

    def fit(self) -> bool:
        """Run from the last committed checkpoint to the last step, and export the policy.

        Returns:
            Whether the last step is done; if not, the run was told to end and has committed the step under way.

        Raises:
            Preempted: the run was told to end while no server answered.
        """
        session = self._session
        shown = self._config.tracking.progress and self._ranks.is_first
        with StepProgress(self._config.algorithm.label, self._total_steps, enabled=shown) as bar:
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
            self._export("export")
            if self._ranks.is_first:
                names = ["export", "export_adapter"] if self._config.model.lora.rank else ["export"]
                record_end(self._output_dir, [self._output_dir / name for name in names], why=session.over)
        self._on_first(self._parts.rollouts, lambda rollouts: rollouts.flush())
        if self._parts.metrics is not None:
            self._parts.metrics.close()
        self._ranks.barrier()  # launchers may kill every rank as soon as rank 0 exits
        return not session.stopped

    def undo(self) -> None:
        """Return the critic server and its folder to the state in which this run found them (dry runs)."""
        self._session.undo()

    def close(self) -> None:
        """End everything that runs beside the loop, including calls under way."""
        self._beside.shutdown()
        self._parts.queue.close()
        for part in (self._parts.critic, self._parts.rollouts):
            if part is not None:
                part.close()

    def train_step(self) -> dict[str, float]:
        """One PPO step: prompts, rollout and scores, both updates, weights to the generator, metrics.

        The critic trains in the other process while the actor trains here; its errors are raised here.
        """
        config, parts, timers = self._config, self._parts, Timers()
        progress = self._session.progress
        step = progress.step + 1
        warming_up = step <= config.algorithm.critic_warmup_steps
        trains_critic = parts.critic is not None and config.algorithm.uses_critic

        parts.residency.enter(GENERATE, timers)
        batch = parts.queue.batch(step, timers)
        parts.residency.enter(SCORE, timers)
        for version in parts.queue.schedule.done_with(step):
            self._write_validation(version)
        repetition = self._beside.submit(repetition_metrics, batch.rollouts) if self._ranks.is_first else None
        experience = parts.experience.build(batch, timers, critic_step=progress.critic_step)
        metrics: dict[str, float] = self._ranks.on_first(lambda: rollout_metrics(experience))
        check_logprob_gap(config.audit, metrics)
        plan = mini_batch_plan(experience, config.algorithm, seed=config.run.seed, step=step)
        timers.lap("metrics")
        critic_update = self._train_critic(experience, plan) if trains_critic and self._ranks.is_first else None
        parts.residency.enter(TRAIN, timers)
        recorded = config.tracking.rollouts.is_due(step)
        new_logprobs = torch.zeros_like(experience.logprobs) if recorded and not warming_up else None
        if not warming_up:
            metrics |= update_actor(
                parts.engine, experience, plan, config.algorithm, self._ranks, max_length=config.generation.max_length,
                seed=mixed_seed(config.run.seed, step, self._ranks.rank), logprobs=new_logprobs,
            )  # fmt: skip
        timers.lap("actor_update")
        if trains_critic:
            critic_metrics = self._ranks.on_first(lambda: {} if critic_update is None else critic_update.result())
            timers.lap("wait_for_critic")
            metrics |= {
                OF_THE_CRITICS_CLOCK.get(name, f"critic/{name}"): value for name, value in critic_metrics.items()
            }
        self._publish(step, timers, validate=self._validation_due(step))
        self._session.progress = replace(
            progress,
            step=step,
            data_position=batch.data_end,
            critic_step=progress.critic_step + trains_critic,
            collector=asdict(parts.experience.state),
        )
        metrics |= self._ranks.on_first(lambda: {} if repetition is None else repetition.result())
        metrics |= {
            "train_rollouts/transfer_probe_gap": batch.probe_gap,
            "train_rollouts/epoch": parts.sampler.epoch(batch.data_end),
        }
        if step == self._total_steps:
            for version in parts.queue.schedule.needed_after(step)[:-1]:
                self._write_validation(version)
        if parts.queue.owes_validation(step) and (self._waits_for_validation or step == self._total_steps):
            metrics |= self._validation(step)
            timers.lap("validation")
        require_owned()
        if recorded:
            self._on_first(parts.rollouts, lambda writer: writer.write(step_samples(step, experience, new_logprobs)))
        timers.lap("tracking")
        metrics |= _timer_metrics(timers, experience) | {"timers/save_stall": self._session.save_stall}
        metrics |= by_node(self._ranks.all_gather(self._utilization.take()))
        metrics |= (
            parts.queue.clock_metrics()
            | parts.residency.clock_metrics()
            | {f"memory/actor_{name}": gib for name, gib in memory().items()}
        )
        if parts.critic is not None and (span := parts.critic.infer_span()) is not None:
            names = ("clock/critic_infer_from", "clock/critic_infer_to", "clock/critic_infer_busy")
            metrics |= dict(zip(names, span, strict=True))
        self._session.save_stall = 0.0
        self._write_metrics(step, metrics)
        self._check_health(step, metrics, experience)
        return metrics

    def _end_here(self, why: str) -> None:
        step = self._session.progress.step
        sentence = f"{why}: the run ends after step {step} of {self._total_steps}"
        if self._ranks.is_first:
            log.info("%s", sentence)
        self._on_first(self._parts.metrics, lambda writer: writer.event(step, "over", sentence))
        for version in self._parts.queue.schedule.needed_after(step):
            self._write_validation(version)
        self._session.end_here(why)

    def _check_health(self, step: int, metrics: dict[str, float], experience: Experience) -> None:
        def texts(row: int) -> tuple[str, str]:
            branches = episodes(experience.rollouts)[row]
            return branches[0].prompt_text, str(self._parts.tokenizer.decode(branches[-1].response_tokens))

        def report(metric: str, sentence: str) -> None:
            if self._parts.metrics is not None:
                self._parts.metrics.event(step, "health", sentence, metric=metric)

        health = check_health(
            self._config.audit,
            metrics,
            Health(**self._session.progress.health),
            step=step,
            bigrams=sum(max(rollout.response_length - 1, 0) for rollout in experience.rollouts),
            samples=lambda: excerpts(experience.scores.rewards.tolist(), texts),
            report=report,
            shown=self._ranks.is_first,
        )
        self._session.progress = replace(self._session.progress, health=asdict(health))

    def _write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self._on_first(self._parts.metrics, lambda writer: writer.write(step, metrics))

    def _on_first(self, part: Part | None, act: Callable[[Part], object]) -> None:
        """Have the first rank ``act`` on a part that no other rank has; its error is raised on all."""
        self._ranks.on_first(lambda: None if part is None else act(part))

    def _train_critic(self, experience: Experience, plan: list[list[int]]) -> "Future[dict[str, float]]":
        """Start the critic's update in the other process."""
        assert self._parts.critic is not None
        return self._parts.critic.train(critic_batch(experience, plan), step=self._session.progress.critic_step + 1)

    def _publish(self, version: int, timers: Timers, *, validate: bool) -> None:
        """Let the engine's weights sample, and say which log-probabilities a generator must compute with them."""
        self._parts.residency.enter(TRAIN)
        target = self._parts.probe.target(self._parts.engine)
        timers.lap("transfer_probe")
        engine = self._parts.engine
        named = engine.hf_weights(to_first=self._config.generation.engines.count > 0 or self._config.placement.in_turns)
        weights = weights_for_generator(named, engine.module.hf, self._config.generation)
        if self._parts.queue.stores_weights:  # the digest is that of the files
            weights = ((name, tensor.cpu()) for name, tensor in weights)
        update = OwnWeights(version, weights, target)
        self._parts.queue.publish(update, timers, validate=validate)
        timers.lap("weight_transfer")

    def _validation_due(self, step: int) -> bool:
        interval = self._config.algorithm.val_check_interval
        return interval > 0 and (step % interval == 0 or step == self._total_steps)

    @property
    def _waits_for_validation(self) -> bool:
        """Whether a step ends with the validation of its weights; else its row is written when the steps that were sampled before
        it are trained."""
        return self._config.algorithm.staleness == 0 or self._config.checkpoint.keep_best

    def _write_validation(self, version: int) -> None:
        """Write the row of a validation that nobody has waited for."""
        if self._parts.queue.owes_validation(version):
            self._write_metrics(version, self._validation(version))

    def _validation(self, step: int) -> dict[str, float]:
        self._parts.residency.enter(GENERATE)
        metrics = self._parts.queue.validation(step)
        reward, best = metrics["val_rollouts/rewards"], self._session.progress.best_reward
        # A validation in which every sample failed has reward NaN and is never the best.
        if self._config.checkpoint.keep_best and reward > (-math.inf if best is None else best):
            note = {"step": step, "val_rollouts/rewards": reward}
            try:
                self._export("best", {"best.json": json.dumps(note)})
            except StorageError as error:  # as for a checkpoint: there may be room for the next one
                if self._ranks.is_first:
                    log.error("%s; training goes on, and the best so far stays that of an earlier step", error)
            else:
                self._session.progress = replace(self._session.progress, best_reward=reward)
        return metrics

    def _restore(self) -> None:
        self._session.restore(self._begin)
        if self._parts.critic is not None:
            self._parts.critic.infer_span()  # those of a step that was given up
        step = self._session.progress.step
        self._on_first(self._parts.metrics, lambda writer: self._record_start(writer, step))
        self._on_first(self._parts.rollouts, lambda writer: writer.rewind(step))
        if step == 0 and self._waits_for_validation:
            self._write_validation(0)

    def _record_start(self, writer: MetricsWriter, step: int) -> None:
        writer.rewind(step if step else -1)
        sentence = f"resumed from the checkpoint of step {step}" if step else "started"
        writer.event(step, "start", sentence, total_steps=self._total_steps)

    def _begin(self, ahead: Path) -> None:
        """Called when the engine holds the weights to continue from; ``ahead`` is the checkpoint's part of that name."""
        progress = self._session.progress
        self._parts.experience.state = ShapingState(**progress.collector) if progress.collector else self._untouched
        self._parts.queue.restore(progress.step, progress.data_position, ahead)
        first = progress.step == 0 and self._config.algorithm.val_check_interval > 0
        self._publish(progress.step, Timers(), validate=first)

    def _export(self, name: str, notes: Mapping[str, str] = {}) -> None:
        self._parts.residency.enter(TRAIN)
        export_policy(
            self._parts.engine, self._ranks, self._output_dir / name, self._config, tokenizer=self._parts.tokenizer, notes=notes,
        )  # fmt: skip


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


def _timer_metrics(timers: Timers, experience: Experience) -> dict[str, float]:
    total = sum(timers.seconds.values())
    tokens = float(sum(rollout.response_length for rollout in experience.rollouts))
    return {
        **{f"timers/{phase}": seconds for phase, seconds in timers.seconds.items()},
        "timers/step": total,
        "timers/tokens_per_second": tokens / total,
        "timers/samples_per_second": len(experience.branches) / total,
    }

"""The training loop of the actor process."""

import json
import logging
import math
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.checkpoint.files import STORAGE_ERRORS, storage_failure, write_atomically
from nemo_style_rlhf.checkpoint.owner import require_owned
from nemo_style_rlhf.checkpoint.starts import record_end
from nemo_style_rlhf.checkpoint.store import CheckpointStore
from nemo_style_rlhf.critic_service.client import CriticTrainBatch, RemoteCritic, ServerRestarted, ServerUnreachable
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.data.ranks import Ranks
from nemo_style_rlhf.data.sampling import PromptSampler, mixed_seed
from nemo_style_rlhf.data.templates import read_template, write_template
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.interface import Generator
from nemo_style_rlhf.generation.transfer import policy_weights, send_weights
from nemo_style_rlhf.launch import interrupt
from nemo_style_rlhf.launch.preemption import request_stop, stop_requested
from nemo_style_rlhf.models.digests import rows_fingerprint
from nemo_style_rlhf.models.export import export_model
from nemo_style_rlhf.models.lora import lora_identity, save_adapter
from nemo_style_rlhf.ppo.audit import Health, Probe, audit_gap, audit_signs
from nemo_style_rlhf.ppo.metrics import excerpts, rollout_metrics, rollout_rows, validation_metrics
from nemo_style_rlhf.ppo.recovery import Recovery
from nemo_style_rlhf.ppo.saving import Saver
from nemo_style_rlhf.ppo.update import mini_batch_plan, update_actor
from nemo_style_rlhf.rollout.collector import Collector, CollectorState
from nemo_style_rlhf.rollout.sampling import Timers
from nemo_style_rlhf.rollout.types import Experience
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.tracking.metrics import MetricsWriter, write_jsonl
from nemo_style_rlhf.tracking.progress import StepProgress

log = logging.getLogger(__name__)
VALIDATION_SEED_OFFSET = 2**32
"""Validation samples have seeds of their own, the same ones every time."""
RECOVERY_PAUSE_S = 1.0
MAX_RECOVERIES = 10
"""Without getting any further: what takes the server away each time will not end by itself."""


@dataclass
class Progress:
    """Where the run stands; part of every checkpoint."""

    step: int = 0
    """PPO steps done."""
    data_position: int = 0
    """Prompts taken from the sampler."""
    critic_step: int = 0
    """Train steps the critic has done."""
    collector: dict[str, Any] = field(default_factory=dict)
    """KL coefficient and running reward statistics."""
    best_reward: float | None = None
    """Of validation, where checkpoint.keep_best is on."""
    health: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`audit.Health`; checkpoints from before it have none."""


@dataclass
class Parts:
    """What the loop connects."""

    engine: Engine
    generator: Generator
    collector: Collector
    critic: RemoteCritic | None
    """None where neither the algorithm nor the reward needs that process. All ranks ask it; the first alone changes it."""
    prompts: list[Prompt]
    val_prompts: list[Prompt]
    tokenizer: PreTrainedTokenizerBase
    probe: Probe
    store: CheckpointStore
    metrics: MetricsWriter | None
    """Of the first rank."""
    versions: dict[str, str]
    ranks: Ranks


class PPOTrainer:
    """Every rank runs it; the first alone writes, and speaks to the server for all but scores."""

    def __init__(
        self, config: PPOActorConfig, parts: Parts, *, run_id: str, identity: dict[str, Any], total_steps: int
    ) -> None:
        self._config = config
        self._parts = parts
        self._ranks = parts.ranks
        self._run_id = run_id
        self._total_steps = total_steps
        self._output_dir = Path(config.run.output_dir)
        self._sampler = PromptSampler(len(parts.prompts), config.run.seed, config.data.shuffle)
        self._probe_gap = self._save_stall = 0.0
        self._saver = Saver(
            parts.store, parts.critic, run_id=run_id, keep_last=config.checkpoint.keep_last,
            max_failures=config.checkpoint.max_failed_saves, identity=identity, versions=parts.versions,
        )  # fmt: skip
        self._recovery = Recovery(parts.critic, parts.store, parts.ranks, run_id=run_id, output_dir=self._output_dir)
        self._untouched = parts.collector.state
        self.progress = Progress()

    def fit(self) -> bool:
        """Run to the last step from wherever the last committed checkpoint stands, and export the policy.

        A server that dies or restarts on the way is waited for; then both halves go back to their last common checkpoint.
        SIGUSR1 (launch/preemption.py) ends the run after the step it came in, committed; in the last one it is ignored. With
        checkpoint.save_on_interrupt the first Ctrl-C does, too.

        Returns:
            Whether the last step is done.

        Raises:
            Preempted: the same signals came while no server answered.
        """
        in_step_with_server = stopping = under_way = False
        lost = furthest = 0
        cause: Exception | None = None
        shown = self._config.tracking.progress and self._ranks.is_first
        with StepProgress(self._total_steps, enabled=shown) as bar:
            while not stopping and (self.progress.step < self._total_steps or not in_step_with_server):
                started = perf_counter()
                try:
                    if not in_step_with_server:
                        self._restore(cause)
                        in_step_with_server = True
                        if not under_way:
                            self._heed_interrupts()
                        under_way = True
                        continue
                    metrics = self.train_step()
                    # Not every rank may have been told by now.
                    told = self._ranks.all_gather((stop_requested(), self._saver.failed))
                    stop, save_failed = map(any, zip(*told, strict=True))
                    if save_failed:
                        self._saver.settle(at=self.progress.step)
                    stopping = stop and self.progress.step < self._total_steps
                    self._commit_if_due(now=stopping or self._saver.owed)
                    if stopping or self.progress.step == self._total_steps:
                        self._saver.settle()
                except (ServerRestarted, ServerUnreachable) as event:
                    lost += 1
                    cause = event if in_step_with_server else cause  # not of one lost while it was restored
                    if lost > MAX_RECOVERIES:
                        raise UserError(
                            f"the critic server was lost {lost} times before step {furthest + 1} was done, in the end so: {event}"
                        ) from event
                    log.warning("%s; both halves go back to their last common checkpoint", event)
                    in_step_with_server = stopping = False
                    sleep(RECOVERY_PAUSE_S)  # a server that is stopping still answers for its status
                    continue
                if self.progress.step > furthest:
                    lost, furthest = 0, self.progress.step
                bar.show(
                    self.progress.step,
                    reward=metrics["train_rollouts/rewards"],
                    kl=metrics.get("train_rollouts/init_policy_kl"),
                    tokens_per_second=metrics["timers/tokens_per_second"],
                    seconds_per_step=perf_counter() - started,
                )
        if stopping:
            log.info("step %d is committed, the run ends as it was told; the same command goes on", self.progress.step)
        else:
            self._export("export")
            if self._ranks.is_first:
                self._record_end()
        if self._parts.metrics is not None:
            self._parts.metrics.close()
        self._ranks.barrier()  # whoever starts ranks may kill all once the first has ended
        return not stopping

    def _record_end(self) -> None:
        names = ["export", "export_adapter"] if self._config.model.lora.rank else ["export"]
        record_end(self._output_dir, [self._output_dir / name for name in names])

    def _heed_interrupts(self) -> None:
        if self._config.run.dry_run:  # nothing goes on from where it stands
            return
        interrupt.describe(self._standing)
        if self._config.checkpoint.save_on_interrupt:
            interrupt.on_first(self._stop_after_step)

    def _standing(self) -> str:
        committed, step = self._parts.store.committed_steps(), self.progress.step
        where = "in the export" if step == self._total_steps else f"in step {step + 1}"
        saved = f"step {committed[-1]} is saved" if committed and committed[-1] else "no step is saved yet"
        return f"stopped {where}; {saved}; the same command goes on"

    def _stop_after_step(self) -> None:
        if self._ranks.is_first:
            log.info(
                "the run ends after step %d, with a checkpoint; Ctrl-C again ends it at once", self.progress.step + 1
            )
        request_stop()

    def undo(self) -> None:
        """Put the critic server back to where this run found it, and its folder (dry runs)."""
        self._recovery.undo()

    def close(self) -> None:
        """End what runs beside the loop, calls under way included."""
        self._parts.collector.close()
        if self._parts.critic is not None:
            self._parts.critic.close()

    def train_step(self) -> dict[str, float]:
        """One PPO step: prompts, rollout and scores, both updates, weights to the generator, metrics.

        The critic trains in the other process while the actor trains here; its errors are raised here.
        """
        config, parts, timers = self._config, self._parts, Timers()
        step = self.progress.step + 1
        position = self.progress.data_position

        def take(count: int) -> list[Prompt]:
            nonlocal position
            indices = self._sampler.take(position, count)
            position += count
            return [parts.prompts[index] for index in indices]

        experience = parts.collector.collect(take, step=step, timers=timers)
        metrics = rollout_metrics(experience)
        audit_gap(config.audit, metrics)
        plan = mini_batch_plan(experience, config.algorithm, seed=config.run.seed, step=step)
        trains_critic = parts.critic is not None and config.algorithm.uses_critic
        critic_update = self._train_critic(experience, plan) if trains_critic and self._ranks.is_first else None
        warming_up = step <= config.algorithm.critic_warmup_steps
        if not warming_up:
            metrics |= update_actor(
                parts.engine, experience, plan, config.algorithm, self._ranks, max_length=config.generation.max_length,
                seed=mixed_seed(config.run.seed, step, self._ranks.rank),
            )  # fmt: skip
        timers.lap("actor_update")
        if trains_critic:
            critic_metrics = self._ranks.on_first(lambda: {} if critic_update is None else critic_update.result())
            timers.lap("wait_for_critic")
            metrics["timers/critic_train"] = critic_metrics.pop("seconds")
            metrics |= {f"critic/{name}": value for name, value in critic_metrics.items()}
        if not warming_up:
            self._send_weights(step, timers)
        self.progress = replace(
            self.progress,
            step=step,
            data_position=position,
            critic_step=self.progress.critic_step + trains_critic,
            collector=asdict(parts.collector.state),
        )
        metrics |= {
            "train_rollouts/transfer_probe_gap": self._probe_gap,
            "train_rollouts/epoch": self._sampler.epoch(position),
        }
        if self._validation_due(step):
            metrics |= self._validate()
            timers.lap("validation")
        require_owned()
        if config.tracking.save_rollouts and self._ranks.is_first:
            rows = rollout_rows(experience, parts.tokenizer)
            write_jsonl(self._output_dir / "rollouts" / f"step_{step:06d}.jsonl", rows)
        timers.lap("tracking")
        metrics |= _timer_metrics(timers, experience) | {"timers/save_stall": self._save_stall}
        self._save_stall = 0.0
        self._write_metrics(step, metrics)
        self._audit_signs(step, metrics, experience)
        return metrics

    def _audit_signs(self, step: int, metrics: dict[str, float], experience: Experience) -> None:
        health = audit_signs(
            self._config.audit,
            metrics,
            Health(**self.progress.health),
            step=step,
            bigrams=sum(max(len(rollout.response_tokens) - 1, 0) for rollout in experience.rollouts),
            samples=lambda: excerpts(rollout_rows(experience, self._parts.tokenizer)),
            shown=self._ranks.is_first,
        )
        self.progress = replace(self.progress, health=asdict(health))

    def _write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if self._parts.metrics is not None:
            self._parts.metrics.write(step, metrics)

    def _train_critic(self, experience: Experience, plan: list[list[int]]) -> "Future[dict[str, float]]":
        """Start the critic's update in the other process."""
        assert self._parts.critic is not None
        return self._parts.critic.train(critic_batch(experience, plan), step=self.progress.critic_step + 1)

    def _send_weights(self, version: int, timers: Timers) -> None:
        parts = self._parts
        send_weights(parts.generator.transport, policy_weights(parts.engine), version)
        timers.lap("weight_transfer")
        self._probe_gap = parts.probe.check(parts.generator, parts.engine)
        timers.lap("transfer_probe")

    def _validation_due(self, step: int) -> bool:
        interval = self._config.algorithm.val_check_interval
        return interval > 0 and (step % interval == 0 or step == self._total_steps)

    def _validate(self) -> dict[str, float]:
        algorithm = self._config.algorithm
        sampled = self._parts.collector.sample(
            self._parts.val_prompts[: algorithm.num_val_samples],
            samples_per_prompt=algorithm.val_samples_per_prompt,
            run_seed=self._config.run.seed + VALIDATION_SEED_OFFSET,
        )
        metrics = validation_metrics(sampled, pass_score=algorithm.val_pass_score)
        reward, best = metrics["val_rollouts/rewards"], self.progress.best_reward
        # NaN, where every sample failed, is never the best.
        if self._config.checkpoint.keep_best and reward > (-math.inf if best is None else best):
            self.progress = replace(self.progress, best_reward=reward)
            self._export("best")
            if self._ranks.is_first:
                note = {"step": self.progress.step, "val_rollouts/rewards": reward}
                write_atomically(self._output_dir / "best" / "best.json", json.dumps(note).encode())
        return metrics

    def _commit_if_due(self, *, now: bool) -> None:
        step = self.progress.step
        if now or step % self._config.checkpoint.save_interval == 0 or step == self._total_steps:
            self._commit()

    def _commit(self) -> None:
        step, began = self.progress.step, perf_counter()
        export_critic = step == self._total_steps and self._config.checkpoint.export_critic
        self._saver.save(
            self._parts.engine,
            step,
            asdict(self.progress),
            critic_step=self.progress.critic_step,
            export_critic=export_critic,
        )
        self._save_stall = perf_counter() - began

    def _restore(self, cause: Exception | None) -> None:
        """Bring both halves to the last common checkpoint; a run without one starts, and commits its step 0."""
        parts = self._parts
        self._saver.abandon(at=self.progress.step)
        manifest = self._recovery.restore_critic(cause)
        if manifest is None:
            self._start()
            return
        parts.store.resume_from(manifest.step)
        self._saver.load(parts.engine, manifest.step)
        self.progress = Progress(**manifest.state)
        collector = self.progress.collector
        parts.collector.state = CollectorState(**collector) if collector else self._untouched
        self._send_weights(self.progress.step, Timers())
        if parts.metrics is not None:
            parts.metrics.rewind(self.progress.step)
        if self.progress.step == 0:
            self._log_step_zero()
        log.info("resumed from step %d", self.progress.step)

    def _start(self) -> None:
        self._send_weights(0, Timers())
        self._commit()
        self._saver.settle()  # a step before it is whole would have nothing to go back to
        self._log_step_zero()

    def _log_step_zero(self) -> None:
        if self._parts.metrics is not None:
            self._parts.metrics.rewind(-1)
        if self._config.algorithm.val_check_interval:
            self._write_metrics(0, self._validate())

    def _export(self, name: str) -> None:
        directory, hf = self._output_dir / name, self._parts.engine.module.hf
        weights = {}
        for key, tensor in policy_weights(self._parts.engine):
            if self._ranks.is_first:
                weights[key] = tensor.cpu()
        if not self._ranks.is_first:
            return
        require_owned()
        model, data = self._config.model, self._config.data
        write_notes = partial(
            write_template, template=data.prompt_template, tokenizer=self._parts.tokenizer, chat_template=data.chat_template,
            append_eos=read_template(model.path).get("append_eos", True),
        )  # fmt: skip
        try:
            export_model(
                hf, directory, source=model.path, weights=weights, write_notes=write_notes,
                trust_remote_code=model.trust_remote_code,
            )  # fmt: skip
            if model.lora.rank:
                save_adapter(hf, self._output_dir / f"{name}_adapter", model, export=directory)
        except STORAGE_ERRORS as error:
            if (reason := storage_failure(error)) is None:
                raise
            raise UserError(
                f"the policy could not be exported to {directory} ({reason}): make room and start again, the run goes on from "
                "its last checkpoint"
            ) from error
        log.info("exported the policy to %s", directory)


def run_identity(config: PPOActorConfig, prompts: list[Prompt] | None = None) -> dict[str, Any]:
    """Settings that give the weights, optimizer states and data position of a checkpoint their meaning, as far as they are known
    without the ``prompts``; engine.zero_stage and the ranks may change."""
    identity = {
        **lora_identity(config.model), "model.dtype": config.model.dtype, "run.seed": config.run.seed,
        "data.shuffle": config.data.shuffle,
    }  # fmt: skip
    if prompts is not None:
        identity["training prompts"] = rows_fingerprint((prompt.prompt_id, prompt.token_ids) for prompt in prompts)
    return identity


def critic_batch(experience: Experience, plan: list[list[int]]) -> CriticTrainBatch:
    """What the critic needs of an experience, in the wire's dtypes."""

    def split(flat: Tensor) -> list[Any]:
        return [part.numpy() for part in flat.split(experience.lengths)]

    assert experience.returns is not None and experience.values is not None  # the estimator has a critic
    return CriticTrainBatch(
        sequences=split(experience.tokens.int()),
        returns=split(experience.returns.float()),
        old_values=split(experience.values.float()),
        masks=split(experience.mask.float()),
        mini_batches=plan,
    )


def _timer_metrics(timers: Timers, experience: Experience) -> dict[str, float]:
    total = sum(timers.seconds.values())
    tokens = float(sum(len(rollout.response_tokens) for rollout in experience.rollouts))
    return {
        **{f"timers/{phase}": seconds for phase, seconds in timers.seconds.items()},
        "timers/step": total,
        "timers/tokens_per_second": tokens / total,
        "timers/samples_per_second": len(experience.rollouts) / total,
    }

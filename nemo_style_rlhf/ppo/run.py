"""The run behind `trainers/train_ppo_actor.py`, from its checked configuration."""

import copy
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch import interrupt
from nemo_style_rlhf.launch.follow_up import after_ppo
from nemo_style_rlhf.launch.preemption import PREEMPTED_EXIT, Preempted
from nemo_style_rlhf.ppo.build import build_trainer
from nemo_style_rlhf.rollout.version_schedule import overlap
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.algorithm import FilterConfig
from nemo_style_rlhf.wire.connection import ServerRestarted
from nemo_style_rlhf.wire.messages import ProtocolError

log = logging.getLogger(__name__)


def run(config: PPOActorConfig) -> None:
    """Train; with ``run.dry_run``, go through every phase once instead and leave no trace.

    Raises:
        SystemExit: SIGUSR1 ended the run early, exit code ``PREEMPTED_EXIT``.
    """
    try:
        _run(config)
    except Preempted as told:
        raise SystemExit(PREEMPTED_EXIT) from told


def _run(config: PPOActorConfig) -> None:
    if not config.run.dry_run:
        with closing(build_trainer(config)) as trainer:
            done = trainer.fit()
        if not done:
            raise SystemExit(PREEMPTED_EXIT)
        log.info("next: %s", after_ppo(config))
        return
    interrupt.as_exception()  # the critic server's changes must be undone
    tiny = tiny_run(config)
    _clear(tiny)
    try:
        with closing(build_trainer(tiny, whole=config)) as trainer:
            try:
                trainer.fit()
            except BaseException:
                with suppress(UserError, ProtocolError, ServerRestarted):  # the user needs the error that ended the run
                    trainer.undo()
                raise
            trainer.undo()
    finally:
        _clear(tiny)
    log.info("dry run: every phase ran once. %s", rehearsed(trainer.metrics, tiny))


def rehearsed(metrics: Mapping[str, float], tiny: PPOActorConfig) -> str:
    """Describe the only step of the ``tiny`` run by its timers, on the first rank. Nothing was sampled during its training; its
    rollout lasts until the last reward arrives."""

    def seconds(*names: str) -> float:
        return sum(metrics.get(f"timers/{name}", 0.0) for name in names)

    rollout = seconds("generate", "beside_sampling", "wait_for_scores")
    training = seconds("step") - seconds("generate", "wait_for_rollout", "wait_for_scores", "validation")
    return (
        f"The rollout took {rollout:.3g} s and training {training:.3g} s, for {tiny.algorithm.num_rollout_samples} samples of at "
        f"most {tiny.generation.max_length} tokens and with the extra costs of a first step: the whole run may compare "
        f"differently. Here {overlap(rollout, training, tiny.generation.engines.count)}"
    )


def _clear(config: PPOActorConfig) -> None:
    """Remove the folder, on the first rank only: the others may finish earlier."""
    if os.environ.get("RANK", "0") == "0":
        shutil.rmtree(config.run.output_dir, ignore_errors=True)


def tiny_run(config: PPOActorConfig) -> PPOActorConfig:
    """A copy of ``config`` for one small PPO step with validation, checkpoint and export, in a separate folder."""
    engines = config.generation.engines
    if engines.count and not engines.launch:
        raise UserError(
            "--dry-run cannot use engines that somebody else starts for the run: give generation.engines.count=0 too"
        )
    tiny = copy.deepcopy(config)
    tiny.run.output_dir = str(Path(config.run.output_dir) / "dry_run")
    tiny.algorithm.max_steps = 1
    tiny.algorithm.critic_warmup_steps = 0
    tiny.algorithm.num_rollout_samples = 4 * config.algorithm.samples_per_prompt
    tiny.algorithm.mini_batches = min(config.algorithm.mini_batches, 2)
    tiny.algorithm.num_val_samples = 2
    tiny.algorithm.val_check_interval = 1 if config.data.val_path else 0
    tiny.generation.max_length = min(config.generation.max_length, 8)
    tiny.generation.min_length = min(config.generation.min_length, tiny.generation.max_length)
    tiny.algorithm.filter = FilterConfig()
    if tiny.algorithm.truncated_samples == "mask":
        tiny.algorithm.truncated_samples = "keep"  # every sample of a tiny run is truncated
    tiny.audit.on_logprob_gap = tiny.audit.on_unhealthy = "warn"  # too few and too short samples for these checks
    tiny.tracking.wandb.enabled = False
    tiny.checkpoint.save_on_interrupt = False
    tiny.checkpoint.keep_last = 2  # undo() needs the checkpoint of step 0
    return tiny

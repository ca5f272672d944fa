"""Starts a run, before any model is loaded: its device, its checkpoint, its prompts and the number of its steps."""

import json
import logging
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.checkpoint.starts import log_differences, require_reachable, require_same, require_work
from nemo_style_rlhf.checkpoint.store import ACTOR, CheckpointStore, Manifest
from nemo_style_rlhf.data.mixtures import TrainingRows
from nemo_style_rlhf.data.prompts import Prompt, load_prompts, load_training_prompts
from nemo_style_rlhf.data.sampling import Sampler
from nemo_style_rlhf.data.template_files import log_date
from nemo_style_rlhf.distributed.ranks import Ranks, require_tensor_parallel
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.factory import require_host
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.models.digests import model_fingerprint, rows_fingerprint
from nemo_style_rlhf.models.loading import load_tokenizer
from nemo_style_rlhf.models.lora import lora_identity
from nemo_style_rlhf.ppo.limits import number_of_steps
from nemo_style_rlhf.ppo.recovery import require_critic_checkpoint
from nemo_style_rlhf.ppo.saving import IDENTITY_FILE
from nemo_style_rlhf.schema.actor import PPOActorConfig

log = logging.getLogger(__name__)
REFERENCE = "the KL reference (model.reference_path)"
"""Name of the reference in a checkpoint's identity."""


@dataclass(frozen=True)
class RunStart:
    """A checked start of a run. Every rank has its own."""

    config: PPOActorConfig
    whole: PPOActorConfig
    """The run that ``config`` tries out; ``config`` itself unless this is a dry run."""
    device: torch.device
    store: CheckpointStore
    resumed: Manifest | None
    """The newest checkpoint of ``whole``. None for a new run, and on every rank but the first."""
    identity: dict[str, Any]
    """See :func:`run_identity`."""
    tokenizer: PreTrainedTokenizerBase
    training: TrainingRows[Prompt]
    validation: list[Prompt]
    sampler: Sampler
    """Order of the training prompts."""
    total_steps: int

    @property
    def output_dir(self) -> Path:
        return Path(self.config.run.output_dir)

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts, validation prompts last."""
        return [*self.training.rows, *self.validation]


def check_start(config: PPOActorConfig, whole: PPOActorConfig) -> RunStart:
    """Set this process up, and check all that can be checked without a model.

    Args:
        whole: the run that ``config`` tries out, whose checks apply too.

    Raises:
        UserError: host, checkpoint, prompts or limits do not allow the run.
    """
    require_tensor_parallel(int(os.environ.get("WORLD_SIZE", "1")), config.generation.sharing_ranks)
    device, engines = setup(config.run), config.generation.engines
    if engines.launch or not engines.count:
        require_host(config.generation, device, repeatable=config.run.repeatable(device.type) and not engines.count)
    resumed, saved = find_checkpoint(whole) if os.environ.get("RANK", "0") == "0" else (None, {})
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    training, validation = _load_prompts(config, tokenizer)
    identity = run_identity(config, training)
    require_same(saved, identity, whole.run.output_dir)
    total_steps = min(number_of_steps(each, len(training.rows)) for each in (whole, config))
    if resumed is not None:
        wanted = number_of_steps(whole, len(training.rows))
        require_reachable(resumed.step, wanted, "algorithm.max_steps", whole.run.output_dir)
        require_work(resumed.step, wanted, whole, "algorithm.max_steps")
    log.info(
        "%s of %s: %d steps of %d samples on %s; metrics, rollouts and checkpoints go to %s",
        config.algorithm.label, config.model.path, total_steps,
        config.algorithm.num_rollout_samples, device, config.run.output_dir,
    )  # fmt: skip
    return RunStart(
        config, whole, device, _checkpoints(config), resumed, identity, tokenizer, training, validation,
        sampler=training.sampler(config.run.seed, config.data.shuffle), total_steps=total_steps,
    )  # fmt: skip


def agree_on_run_id(start: RunStart, ranks: Ranks) -> str:
    """The id of the resumed run, or a new one. Every rank calls this."""
    resumed = start.resumed if start.whole is start.config else None
    return str(ranks.from_first(uuid.uuid4().hex[:12] if resumed is None else resumed.run_id))


def find_checkpoint(config: PPOActorConfig) -> tuple[Manifest | None, dict[str, Any]]:
    """The newest checkpoint of the run, from which ``config`` may resume, and the identity saved in it. Logs settings that
    differ from the last start.

    Raises:
        UserError: ``run.resume`` forbids resuming, or ``config`` differs from the saved identity.
    """
    log_differences(Path(config.run.output_dir), config)
    store = _checkpoints(config)
    if store.committed_steps() and config.run.resume == "never":
        raise UserError(
            f"run.resume=never but {config.run.output_dir} holds checkpoints: give another run.output_dir, or run.resume=auto"
        )
    manifest = store.latest()
    if manifest is None:
        if config.run.resume == "must":
            raise UserError(f"run.resume=must but {config.run.output_dir} holds no checkpoint: use run.resume=auto")
        return None, {}
    saved = json.loads((store.part(manifest.step, ACTOR) / IDENTITY_FILE).read_bytes())
    require_same(saved, run_identity(config), config.run.output_dir)
    if config.algorithm.uses_critic:
        require_critic_checkpoint(manifest)
    return manifest, saved


def _checkpoints(config: PPOActorConfig) -> CheckpointStore:
    return CheckpointStore(Path(config.run.output_dir) / "checkpoints", config.checkpoint.keep_last)


def run_identity(config: PPOActorConfig, training: TrainingRows[Prompt] | None = None) -> dict[str, Any]:
    """Settings that give the weights, optimizer states and data position of a checkpoint their meaning. Without ``training``,
    settings that depend on them are missing. engine.zero_stage and the number of ranks may change, so they are not among them."""
    identity = {
        **lora_identity(config.model), "model.dtype": config.model.dtype, "run.seed": config.run.seed,
        "data.shuffle": config.data.shuffle, "algorithm.staleness": config.algorithm.staleness,
    }  # fmt: skip
    if config.algorithm.staleness:  # batches of later steps are sampled already, so many of each prompt
        identity["algorithm.samples_per_prompt"] = config.algorithm.samples_per_prompt
    if config.needs_reference:
        identity[REFERENCE] = model_fingerprint(config.model.reference_model.path)
    if training is not None:
        fingerprint = rows_fingerprint((prompt.prompt_id, prompt.token_ids) for prompt in training.rows)
        identity |= {**training.identity, "training prompts": fingerprint}
    return identity


def _load_prompts(
    config: PPOActorConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[TrainingRows[Prompt], list[Prompt]]:
    """The prompts for training, and for validation if the run has any."""
    whole_distribution = config.algorithm.old_logprobs == "sampler"
    training = load_training_prompts(config.data, tokenizer, whole_distribution=whole_distribution)
    for report in training.reports:
        log.info("%s", report)
    validation: list[Prompt] = []
    if config.data.val_path:
        validation, report = load_prompts(config.data.val_path, config.data, tokenizer)
        log.info("%s", report)
    log_date(config.data, tokenizer)
    return training, validation

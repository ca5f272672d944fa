"""Runs a supervised stage from files to an exported model; Lightning's Trainer does the training."""

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.apply_func import move_data_to_device
from pytorch_lightning.strategies import Strategy
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_style_rlhf.checkpoint.files import storage_errors
from nemo_style_rlhf.checkpoint.owner import require_owned
from nemo_style_rlhf.checkpoint.starts import (
    log_differences,
    record_end,
    record_start,
    require_reachable,
    require_work,
)
from nemo_style_rlhf.data import layouts
from nemo_style_rlhf.data.mixtures import load_training_rows
from nemo_style_rlhf.data.ragged import round_up
from nemo_style_rlhf.data.records import DropReport
from nemo_style_rlhf.data.sources import read_records
from nemo_style_rlhf.data.template_files import check_template, log_date
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch import interrupt
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.launch.follow_up import Prompts
from nemo_style_rlhf.launch.preemption import request_stop
from nemo_style_rlhf.launch.starting import starting
from nemo_style_rlhf.models.cpu_linear import CPU_EMULATES_BF16
from nemo_style_rlhf.models.digests import rows_fingerprint
from nemo_style_rlhf.models.loading import load_tokenizer
from nemo_style_rlhf.models.lora import lora_identity
from nemo_style_rlhf.models.scalar import max_positions
from nemo_style_rlhf.schema.sources import Sources
from nemo_style_rlhf.schema.supervised import ZERO_STAGES, PairDataConfig, SupervisedConfig, SupervisedDataConfig
from nemo_style_rlhf.supervised.batches import Collate, Positions, TrainingBatches, ValidationBatches, parts_within
from nemo_style_rlhf.supervised.checkpoints import (
    AtomicCheckpointIO,
    StageCheckpoints,
    completed_steps,
    last_checkpoint,
    require_no_lost_results,
    saved_steps,
    set_results_aside,
)
from nemo_style_rlhf.supervised.metrics_logger import MetricsLogger
from nemo_style_rlhf.supervised.models import rehearse_writing, write_model
from nemo_style_rlhf.supervised.module import SupervisedModule
from nemo_style_rlhf.supervised.progress import StageProgress
from nemo_style_rlhf.tracking.metrics import MetricsWriter

logger = logging.getLogger(__name__)
RANK_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"))  # torchrun's
Loader = Callable[[Sources, Any, PreTrainedTokenizerBase], tuple[Sequence[Any], DropReport]]


class Stage:
    """Data, Trainer and export of one stage."""

    def __init__(
        self,
        config: SupervisedConfig,
        data: SupervisedDataConfig,
        load: Loader,
        collate: Collate,
        *,
        name: str,
        then: Callable[[Prompts], str],
    ) -> None:
        """Set up the process and load the data, before any model.

        Args:
            name: the stage's name for the user.
            then: makes a command that the user may run next.

        Raises:
            UserError: the data is unusable, or a step has fewer rows than ranks.
        """
        self.config, self.data, self.collate = config, data, collate
        self._name, self._then = name, then
        self.device = setup(config.run)
        self._rank, self._world_size = (int(os.environ.get(name, default)) for name, default in RANK_VARIABLES)
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        resumed = None if config.run.dry_run else last_checkpoint(config)
        if resumed is None and not config.run.dry_run:
            require_no_lost_results(config)
        if self.is_first_rank:
            log_differences(Path(config.run.output_dir), config)
        starting("reading the data")
        self.tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        if isinstance(data, PairDataConfig):  # rewards and preferences judge texts as the model writes them
            check_template(config.model.path, data, self.tokenizer)
        self.training = load_training_rows(data, lambda sources, _: load(sources, data, self.tokenizer))
        self.train_rows = self.training.rows
        self.val_rows: Sequence[Any] = []
        reports = self.training.reports
        if data.val_path:
            self.val_rows, report = load(data.val_path, data, self.tokenizer)
            reports = [*reports, report]
        self._prompt_layout: tuple[str, str] | None = None
        if isinstance(data, PairDataConfig):
            first = next(read_records(data.val_path or data.training_sources[0]))
            self._prompt_layout = layouts.prompt_layout(first, data)
        for report in reports:
            logger.info("%s", report)
        log_date(data, self.tokenizer)
        fit = config.trainer
        self.total_steps = fit.max_steps or math.ceil(fit.max_epochs * len(self.train_rows) / fit.batch_size)
        if config.run.dry_run:
            self.total_steps = 1
        self._micro_batches = self._parts_of_a_step()
        self._identity = self._identify()
        self._resumed = resumed
        self._resumed_step = step = 0 if resumed is None else completed_steps(resumed, self._identity)
        require_reachable(step, self.total_steps, "trainer.max_steps", config.run.output_dir)
        require_work(step, self.total_steps, config, "trainer.max_steps")
        starting("loading the model")

    def fit(self, module: SupervisedModule, hf: PreTrainedModel) -> dict[str, float]:
        """Train ``module`` from the beginning or the last checkpoint, and validate; returns the last validation's metrics.

        Raises:
            UserError: ``hf`` could not be exported after the training.
            Preempted: the stage was asked to stop early.
        """
        config, resumed = self.config, self._resumed
        rehearse_writing(hf, config.model, self.data, self.tokenizer)
        if config.model.gradient_checkpointing:
            hf.gradient_checkpointing_enable()
        module.train()
        module.seed, module.identity, module.validates = config.run.seed, self._identity, bool(self.val_rows)
        if self.is_first_rank and not config.run.dry_run:
            if resumed is None:
                set_results_aside(config)
            record_start(Path(config.run.output_dir), config, after=resumed.stem if resumed else "step_00000000")
        self.trainer = self._trainer()
        if resumed is not None:
            logger.info("resuming from %s", resumed)
        logger.info(
            "%s: %d steps of %d rows from %s on %s; metrics and checkpoints go to %s", self._name, self.total_steps,
            config.trainer.batch_size, config.model.path, self.device, config.run.output_dir,
        )  # fmt: skip
        interrupt.describe(self._standing)
        if config.checkpoint.save_on_interrupt:
            interrupt.on_first(self._stop_after_step)
        self.trainer.fit(
            module,
            self._loader(self._batches(), done=self._resumed_step * self._accumulate),
            self._validation(),
            ckpt_path=resumed,
            weights_only=True,
        )
        found = self.trainer.callback_metrics.items()
        metrics = {name: float(value) for name, value in found if name.startswith("val/")}
        logger.info("%s", f"trained {self.trainer.global_step} steps {_formatted(metrics)}".rstrip())
        return metrics

    def _standing(self) -> str:
        """The sentence for an interrupt, about the stage's progress."""
        done, saved = self.trainer.global_step, saved_steps(self.config)
        where = f"in step {done + 1}" if done < self.total_steps else "after the last step"
        return f"stopped {where}; {f'step {saved[-1]} is saved' if saved else 'no step is saved yet'}; the same command goes on"

    def _stop_after_step(self) -> None:
        if self.is_first_rank:
            logger.info(
                "the stage ends after step %d, with a checkpoint; Ctrl-C again ends it at once",
                self.trainer.global_step + 1,
            )
        request_stop()

    def _parts_of_a_step(self) -> int:
        """Micro-batches of a step over all ranks: the number that the fullest step needs, used for every step."""
        fit, packed = self.config.trainer, self.config.model.packing
        parts = fit.batch_size // (fit.micro_batch_size or fit.batch_size)
        if fit.micro_batch_tokens:
            whole = self._batches(micro_batches=1)
            lengths = ([len(row) for row in whole.step_rows(step)] for step in range(self.total_steps))
            parts = max(parts_within(step, fit.micro_batch_tokens, packed=packed) for step in lengths)
        parts = round_up(parts, self._world_size)
        if parts > fit.batch_size:
            raise UserError(
                f"trainer.batch_size={fit.batch_size} cannot be split over {self._world_size} ranks in {parts} parts: raise it"
            )
        return parts

    @property
    def is_first_rank(self) -> bool:
        """True if this rank writes files."""
        return self._rank == 0

    @property
    def _accumulate(self) -> int:
        """Number of micro-batches per rank and optimizer step."""
        return self._micro_batches // self._world_size

    def _identify(self) -> dict[str, Any]:
        """Settings on which the order of micro-batches and the meaning of a checkpoint's weights depend."""
        fit, run = self.config.trainer, self.config.run
        # With a budget of tokens, the number of parts depends on the fullest step, and so on the length of the run.
        split = {"trainer.micro_batch_tokens": fit.micro_batch_tokens}
        if not fit.micro_batch_tokens:
            split["micro-batches per step"] = self._micro_batches
        return {
            **lora_identity(self.config.model), **self.training.identity,
            "training data": rows_fingerprint(self.train_rows), "trainer.batch_size": fit.batch_size,
            "run.seed": run.seed, **split, "ranks": self._world_size, "trainer.strategy": fit.strategy,
        }  # fmt: skip

    def _batches(self, *, micro_batches: int = 0) -> TrainingBatches[Any, Any]:
        return TrainingBatches(
            self.train_rows,
            self.collate,
            self.tokenizer.pad_token_id,
            batch_size=self.config.trainer.batch_size,
            micro_batches=micro_batches or self._micro_batches,
            steps=self.total_steps,
            seed=self.config.run.seed,
            packed=self.config.model.packing,
            sampler=self.training.sampler(self.config.run.seed),
        )

    def _validation(self) -> DataLoader[Any] | None:
        if not self.val_rows:
            return None
        batch_size = self.config.trainer.val_batch_size
        rows = self.val_rows[: max(batch_size, self._world_size)] if self.config.run.dry_run else self.val_rows
        if len(rows) < self._world_size:
            raise UserError(
                f"{self.data.val_path} has {len(rows)} rows for {self._world_size} ranks: give each rank one, or set "
                "data.val_path=null"
            )
        batches: ValidationBatches[Any, Any] = ValidationBatches(
            rows, self.collate, self.tokenizer.pad_token_id, batch_size=batch_size, ranks=self._world_size
        )
        return self._loader(batches)

    def _loader(self, batches: Any, *, done: int = 0) -> DataLoader[Any]:
        positions = Positions(len(batches), rank=self._rank, stride=self._world_size, done=done)
        return DataLoader(batches, batch_size=None, sampler=positions)

    @property
    def _autocasts(self) -> bool:
        emulated = self.device.type == "cpu" and CPU_EMULATES_BF16  # less precise, and four times slower than fp32
        return self.config.model.dtype == "bfloat16" and not emulated

    def autocast(self) -> torch.autocast:
        """Context for the models' computations, in their precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocasts)

    def _strategy(self) -> Strategy | str:
        stage = ZERO_STAGES.get(self.config.trainer.strategy)
        if stage is None:
            return "ddp" if self._world_size > 1 else "auto"
        from nemo_style_rlhf.supervised.deepspeed_strategy import (
            ZeroStrategy,  # takes 3 s, and must follow the choice of device
        )

        clip = self.config.engine.gradient_clip_val
        return ZeroStrategy(stage, gradient_clip_val=clip, autocasts=self._autocasts, device=self.device)

    def _trainer(self) -> pl.Trainer:
        config, fit = self.config, self.config.trainer
        strategy = self._strategy()
        return pl.Trainer(
            accelerator="gpu" if self.device.type == "cuda" else "cpu",
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            num_nodes=self._world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            strategy=strategy,
            use_distributed_sampler=False,  # each rank's loader already selects its own micro-batches
            # A strategy object sets its own precision.
            precision="bf16-mixed" if self._autocasts and isinstance(strategy, str) else None,
            max_epochs=1,  # the data set is the whole run
            accumulate_grad_batches=self._accumulate,
            val_check_interval=fit.val_interval * self._accumulate if 0 < fit.val_interval < self.total_steps else None,
            num_sanity_val_steps=0,
            log_every_n_steps=fit.log_interval,
            logger=self._loggers(),
            callbacks=[
                *(
                    [StageProgress(self._name, self.total_steps)]
                    if config.tracking.progress and self.is_first_rank
                    else []
                ),
                *([] if config.run.dry_run else [StageCheckpoints(config, self.total_steps)]),
            ],
            plugins=[AtomicCheckpointIO()],
            enable_checkpointing=False,  # Lightning's own
            enable_model_summary=False,
            enable_progress_bar=False,  # Lightning's counts micro-batches
            default_root_dir=config.run.output_dir,
        )

    def _loggers(self) -> list[MetricsLogger]:
        if self.config.run.dry_run or self._rank > 0:
            return []
        resolved = dataclasses.asdict(self.config)
        self.writer = MetricsWriter(Path(self.config.run.output_dir), self.config.tracking, resolved)
        resumed_step = self._resumed_step
        self.writer.rewind(resumed_step - 1)  # Lightning's steps count from 0
        sentence = f"resumed from the checkpoint of step {resumed_step}" if resumed_step else "started"
        self.writer.event(resumed_step, "start", sentence, total_steps=self.total_steps)
        return [MetricsLogger(self.writer)]

    def sample(self, count: int) -> list[Any]:
        """The first ``count`` training rows of the shuffled order, or all."""
        positions = self._batches(micro_batches=1).sampler.take(0, min(count, len(self.train_rows)))
        return [self.train_rows[position] for position in positions]

    def on_device(self, rows: Sequence[Any]) -> Iterator[tuple[list[Any], Any]]:
        """Batches of ``rows``, longest first, on the model's device: yields the rows of each batch, and the batch."""
        batches: ValidationBatches[Any, Any] = ValidationBatches(
            rows, self.collate, self.tokenizer.pad_token_id, batch_size=self.config.trainer.val_batch_size
        )
        for index in range(len(batches)):
            yield batches.rows_of(index), move_data_to_device(batches[index], self.device)

    def export(self, hf: PreTrainedModel) -> None:
        """Write ``hf``, the trained model, with its tokenizer and templates; not in a dry run.

        Raises:
            StorageError: the disk refused.
        """
        if self.config.run.dry_run or not self.is_first_rank:
            return
        require_owned()
        target = Path(self.config.export_path)
        needed = sum(parameter.nbytes for parameter in hf.parameters())
        with storage_errors(
            f"the model's export {target}", "make room or change export_dir", folder=target, needed=needed
        ):
            written = write_model(hf, target, self.config.model, self.data, self.tokenizer)
            record_end(Path(self.config.run.output_dir), written)
        logger.info(
            "exported to %s; next: %s",
            target,
            self._then(Prompts(self._prompt_layout, len(self.train_rows), max_positions(hf))),
        )


def _formatted(metrics: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.4f}" for name, value in metrics.items())

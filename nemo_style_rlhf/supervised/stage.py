"""A supervised stage from files to an exported model; Lightning's Trainer does the training."""

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_style_rlhf.data.records import DropReport
from nemo_style_rlhf.data.templates import write_template
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.models.cpu_linear import CPU_EMULATES_BF16
from nemo_style_rlhf.models.export import export_model
from nemo_style_rlhf.models.loading import load_tokenizer
from nemo_style_rlhf.schema.common import ModelConfig
from nemo_style_rlhf.schema.supervised import SupervisedConfig, SupervisedDataConfig
from nemo_style_rlhf.supervised.batches import Collate, TrainingBatches, ValidationBatches
from nemo_style_rlhf.supervised.metrics_logger import MetricsLogger
from nemo_style_rlhf.supervised.module import SupervisedModule
from nemo_style_rlhf.tracking.metrics import MetricsWriter

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=ModelConfig)
Loader = Callable[[str, Any, PreTrainedTokenizerBase], tuple[Sequence[Any], DropReport]]


def training_precision(model: Model) -> Model:
    """``model`` with fp32 weights: bfloat16 is Lightning's mixed precision over fp32 masters."""
    return dataclasses.replace(model, dtype="float32")


class Stage:
    """Data, Trainer and export of one stage."""

    def __init__(self, config: SupervisedConfig, data: SupervisedDataConfig, load: Loader, collate: Collate) -> None:
        """Set the process up and load the data, before any model.

        Raises:
            UserError: anything wrong with the data.
        """
        self.config, self.data, self.collate = config, data, collate
        self.device = setup(config.run)
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        self.tokenizer = load_tokenizer(config.model.path)
        self.train_rows = self._load(load, data.train_path)
        self.val_rows = self._load(load, data.val_path) if data.val_path else []
        fit = config.trainer
        self.total_steps = fit.max_steps or math.ceil(fit.max_epochs * len(self.train_rows) / fit.batch_size)
        if config.run.dry_run:
            self.total_steps = 1

    def fit(self, module: SupervisedModule, hf: PreTrainedModel) -> dict[str, float]:
        """Train ``module``, validate, and export ``hf``, its model; the last validation's metrics."""
        if self.config.model.gradient_checkpointing:
            hf.gradient_checkpointing_enable()
        module.train()
        trainer = self._trainer()
        validation = self._validation()
        trainer.fit(
            module, DataLoader(self._batches(), batch_size=None), validation if self._validates_within_fit else None
        )
        metrics = dict(trainer.validate(module, validation, verbose=False)[0]) if validation is not None else {}
        logger.info("trained %d steps %s", trainer.global_step, _formatted(metrics))
        if not self.config.run.dry_run:
            self._export(hf)
        return metrics

    def _load(self, load: Loader, path: str) -> Sequence[Any]:
        rows, report = load(path, self.data, self.tokenizer)
        logger.info("%s", report)
        return rows

    def _batches(self) -> TrainingBatches[Any]:
        fit = self.config.trainer
        return TrainingBatches(
            self.train_rows,
            self.collate,
            self.tokenizer.pad_token_id,
            batch_size=fit.batch_size,
            micro_batch_size=fit.micro_batch_size or fit.batch_size,
            steps=self.total_steps,
            seed=self.config.run.seed,
        )

    def _validation(self) -> DataLoader[Any] | None:
        if not self.val_rows:
            return None
        batch_size = self.config.trainer.val_batch_size
        rows = self.val_rows[:batch_size] if self.config.run.dry_run else self.val_rows
        batches: ValidationBatches[Any] = ValidationBatches(
            rows, self.collate, self.tokenizer.pad_token_id, batch_size=batch_size
        )
        return DataLoader(batches, batch_size=None)

    @property
    def _validates_within_fit(self) -> bool:
        return 0 < self.config.trainer.val_interval < self.total_steps

    @property
    def _precision(self) -> Literal["bf16-mixed", "32-true"]:
        if self.device.type == "cpu" and CPU_EMULATES_BF16:
            return "32-true"  # the mixed one would compute less precisely, and four times slower
        return "bf16-mixed" if self.config.model.dtype == "bfloat16" else "32-true"

    def _trainer(self) -> pl.Trainer:
        config, fit = self.config, self.config.trainer
        accumulate = fit.batch_size // (fit.micro_batch_size or fit.batch_size)
        return pl.Trainer(
            accelerator="gpu" if self.device.type == "cuda" else "cpu",
            devices=1,
            precision=self._precision,
            max_epochs=1,  # the data set is the whole run
            accumulate_grad_batches=accumulate,
            val_check_interval=fit.val_interval * accumulate if self._validates_within_fit else None,
            num_sanity_val_steps=0,
            log_every_n_steps=fit.log_interval,
            logger=self._loggers(),
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=config.tracking.progress and sys.stderr.isatty(),
            default_root_dir=config.run.output_dir,
        )

    def _loggers(self) -> list[MetricsLogger]:
        if self.config.run.dry_run:
            return []
        resolved = OmegaConf.to_container(OmegaConf.structured(self.config))
        assert isinstance(resolved, dict)
        named = {str(key): value for key, value in resolved.items()}
        self.writer = MetricsWriter(Path(self.config.run.output_dir), self.config.tracking, named)
        self.writer.rewind(-1)  # a stage starts from the beginning
        return [MetricsLogger(self.writer)]

    def _export(self, hf: PreTrainedModel) -> None:
        """
        Raises:
            UserError: the folder cannot be written.
        """
        target, model = Path(self.config.export_path), self.config.model
        try:
            hf.to(getattr(torch, model.dtype))
            export_model(hf, target, source=model.path, config_source=model.config_path)
            data = self.data
            write_template(target, data.prompt_template, self.tokenizer, data.chat_template, append_eos=data.append_eos)
        except OSError as error:
            raise UserError(
                f"the model cannot be written to {target} ({error}): make room or change export_dir"
            ) from error
        logger.info("exported to %s", target)


def _formatted(metrics: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.4f}" for name, value in metrics.items())

"""Lightning's DeepSpeed strategy as the stages use it: also on CPUs, with checkpoints that are whole or absent."""

import os
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-untyped]
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy

from nemo_style_rlhf.checkpoint.files import storage_failure
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.supervised.checkpoints import IDENTITY, PROGRESS_FILE

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
"""By ``trainer.strategy``."""


class ZeroStrategy(DeepSpeedStrategy):
    """ZeRO 1 to 3 (arXiv 1910.02054). After a fit the module is plain again, with whole weights on every rank."""

    def __init__(self, stage: int, *, gradient_clip_val: float, on_cpu: bool) -> None:
        super().__init__(
            stage=stage,
            overlap_comm=not on_cpu,
            logging_batch_size_per_gpu=1,
            exclude_frozen_parameters=True,
            process_group_backend="gloo" if on_cpu else None,
        )
        assert isinstance(self.config, dict)
        self.config["gradient_clipping"] = gradient_clip_val

    @property
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device  # DeepSpeed wants an index

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)  # Lightning's own refuses CPUs, which DeepSpeed does not

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _initialize_deepspeed_train(self, model: torch.nn.Module) -> None:
        super()._initialize_deepspeed_train(model)
        if self.zero_stage_3:
            for policy in (part for part in model.modules() if isinstance(part, PolicyModel)):
                # It multiplies with the head's weight itself, and that is in shares outside of the head's own forward.
                deepspeed.zero.register_external_parameter(policy, policy.hf.get_output_embeddings().weight)

    def grad_norm(self) -> float:
        """Of the last optimizer step, over all ranks, before clipping."""
        return float(self.deepspeed_engine.get_global_grad_norm())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """A folder, to which every rank adds its share."""
        final = Path(self.broadcast(str(filepath)))
        beside = final.with_name(final.name + ".tmp")
        try:
            super().save_checkpoint(checkpoint, beside, storage_options)
            self.barrier()
            if self.is_global_zero:
                torch.save({name: checkpoint[name] for name in (IDENTITY, "loops")}, beside / PROGRESS_FILE)
                for path in (path for path in beside.rglob("*") if path.is_file()):
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
                beside.replace(final)
        except (OSError, RuntimeError) as error:
            reason = storage_failure(error)
            if reason is None:
                raise
            raise UserError(
                f"the checkpoint {final} cannot be written ({reason}): make room and start again, the last one is whole"
            ) from error
        self.barrier()

    def teardown(self) -> None:
        if self.zero_stage_3 and isinstance(self.lightning_module, pl.LightningModule) and self.model is not None:
            _make_whole(self.deepspeed_engine)
        super().teardown()


def _make_whole(engine: Any) -> None:
    """Gather every parameter for good, and take the hooks off that would cut it into shares again."""
    engine.optimizer.parameter_offload._remove_module_hooks()
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_id"):
            parameter.all_gather(param_list=[parameter])

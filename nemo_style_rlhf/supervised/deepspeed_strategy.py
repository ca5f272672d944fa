"""Lightning's DeepSpeed strategy, extended to CPUs and to checkpoints that are either complete or absent.

Only this file touches private parts of Lightning, as they are in version 2.6.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning.plugins.precision import DeepSpeedPrecision
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy

from nemo_style_rlhf.checkpoint.files import published, storage_errors, unpublished
from nemo_style_rlhf.engine import deepspeed_private
from nemo_style_rlhf.engine.files import DataFiles
from nemo_style_rlhf.engine.process_group import init_distributed
from nemo_style_rlhf.engine.shards import make_whole, use_sharded_heads
from nemo_style_rlhf.supervised.checkpoints import IDENTITY, PROGRESS_FILE


class ZeroStrategy(DeepSpeedStrategy):
    """ZeRO 1 to 3 (arXiv 1910.02054), with fp32 weights.

    After a successful fit the module is an ordinary one again, on the CPU, and the first rank has the whole weights.
    """

    def __init__(self, stage: int, *, gradient_clip_val: float, autocasts: bool, device: torch.device) -> None:
        """With ``autocasts``, compute in bfloat16, as Lightning's bf16-mixed does without DeepSpeed."""
        on_cpu = device.type == "cpu"
        super().__init__(
            stage=stage,
            overlap_comm=not (on_cpu or torch.are_deterministic_algorithms_enabled()),
            logging_batch_size_per_gpu=1,
            exclude_frozen_parameters=True,
            precision_plugin=DeepSpeedPrecision("32-true"),  # DeepSpeed's own mixed precision has bfloat16 weights
        )
        assert isinstance(self.config, dict)
        self.config["gradient_clipping"] = gradient_clip_val
        self.config["torch_autocast"] = {"enabled": autocasts, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        self._device = torch.device("cpu", 0) if on_cpu else device  # DeepSpeed requires an index

    @property
    def root_device(self) -> torch.device:
        return self._device

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)  # Lightning's own method refuses CPUs; DeepSpeed supports them

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        init_distributed(self._device)

    def _initialize_deepspeed_train(self, model: torch.nn.Module) -> None:
        super()._initialize_deepspeed_train(model)
        deepspeed_private.use_checkpoint_engine(self.deepspeed_engine, DataFiles)
        if self.zero_stage_3:
            use_sharded_heads(model)
            # The cache would keep the bf16 weights of every layer until the forward ends.
            torch.set_autocast_cache_enabled(False)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a folder; every rank adds its shard."""
        final = Path(self.broadcast(str(filepath)))
        with storage_errors(final), published(final) if self.is_global_zero else nullcontext():
            self.barrier()  # until the first rank has removed what a killed run left
            super().save_checkpoint(checkpoint, unpublished(final), storage_options)
            self.barrier()
            if self.is_global_zero:
                progress = {name: checkpoint[name] for name in (IDENTITY, "loops", "global_step")}
                torch.save(progress, unpublished(final) / PROGRESS_FILE)
        self.barrier()

    def on_train_end(self) -> None:
        if self.zero_stage_3:
            make_whole(self.deepspeed_engine, keep=self.is_global_zero)

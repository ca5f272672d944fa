"""The only wrapper over DeepSpeed: forward, backward, step, offload, save, load, read the weights."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-untyped]
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from nemo_style_rlhf.checkpoint.data import NOT_DATA
from nemo_style_rlhf.engine import deepspeed_private
from nemo_style_rlhf.engine.files import unreadable_files
from nemo_style_rlhf.engine.plain_adamw import PlainAdamW
from nemo_style_rlhf.engine.process_group import init_distributed
from nemo_style_rlhf.engine.reshape import Saved, is_bf16, load_reshaped
from nemo_style_rlhf.engine.schedule import follow_config, lr_factor
from nemo_style_rlhf.engine.shards import place, settle, use_sharded_heads, whole_weights
from nemo_style_rlhf.engine.snapshot import FOLDER, InMemory, Snapshot
from nemo_style_rlhf.engine.storages import Storages, address, weights_of
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.lora import merged
from nemo_style_rlhf.schema.common import BUCKET_ELEMENTS, EngineConfig

CHECKPOINT_TAG = "state"


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite: training on would silently learn nothing or destroy the weights."""


class Engine:
    """One trained module: ``loss = f(engine(...)); engine.backward(loss); ...; engine.step()``.

    Losses given to :meth:`backward` between two steps add up, over all ranks, to the loss of the optimizer step. Callers divide
    each by the token (or sequence) count of the whole step, so that neither the number of micro-batches nor the number of
    ranks changes the gradient. This class cancels DeepSpeed's averaging over ranks and accumulation steps.
    """

    def __init__(
        self, module: nn.Module, config: EngineConfig, *, device: torch.device, total_steps: int | None = None
    ) -> None:
        """Take over ``module``, in host memory, for ``device``; the ranks join a process group if they have not yet.

        ``total_steps`` is used by a schedule that does not set its own.
        """
        self._steps = config.scheduler.total_steps or total_steps or 0
        if config.scheduler.name != "constant" and self._steps == 0:
            raise UserError(
                f"engine.scheduler.name={config.scheduler.name} needs engine.scheduler.total_steps, "
                "the optimizer steps of the whole run: set it"
            )
        self.config = config
        self.device = device
        if not torch.distributed.is_initialized():
            init_distributed(device)
        if (ranks := torch.distributed.get_world_size()) % config.zero_hpz_partition_size:
            raise UserError(
                f"engine.zero_hpz_partition_size={config.zero_hpz_partition_size} with {ranks} ranks, which it must divide: give "
                "the ranks of a node, or 1"
            )
        generated = _deepspeed_config(config, module, device)
        place(module, generated, device)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        settings: dict[str, Any] = {
            "lr": config.optim.lr,
            "betas": config.optim.betas,
            "eps": config.optim.eps,
            "weight_decay": config.optim.weight_decay,
            "fused": True,
        }
        optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(trained, **settings)
            if config.zero_stage
            else PlainAdamW(trained, clip=config.gradient_clip_val, **settings)
        )
        schedule = partial(lr_factor, config=config.scheduler, total_steps=self._steps)
        self._deepspeed, self._optimizer, _, self._scheduler = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, schedule),
            config=generated,
            dist_init_required=False,
        )
        deepspeed_private.use_checkpoint_engine(self._deepspeed, InMemory)
        deepspeed_private.copy_no_script(self._deepspeed)
        if config.zero_stage == 3:
            use_sharded_heads(module)
        self._weights = Storages(lambda: weights_of(self.module), device)
        self._states = Storages(self._state_tensors, device)
        self._partly_frozen = not all(parameter.requires_grad for parameter in module.parameters())

    @property
    def module(self) -> Any:
        return self._deepspeed.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._deepspeed(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, a scalar part of the step's loss.

        Raises:
            NonFiniteError: the loss is NaN or infinite; the weights have not changed.
        """
        # With several ranks, one must not stop by itself: the reduced gradient shows the fault to all.
        if self._deepspeed.dp_world_size == 1 and not math.isfinite(loss.item()):
            raise NonFiniteError(f"the loss is {loss.item()}")
        self._deepspeed.backward(loss * self._deepspeed.dp_world_size)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._scheduler.get_last_lr()[0])

    def step(self) -> float:
        """Reduce gradients over ranks, clip, update, advance the schedule.

        Returns:
            The global L2 norm of the gradient before clipping.

        Raises:
            NonFiniteError: the gradient was NaN or infinite; the weights are lost, but the last checkpoint is good.
        """
        self._deepspeed.step()
        whole = self.config.zero_stage == 0
        grad_norm = self._optimizer.grad_norm if whole else float(self._deepspeed.get_global_grad_norm())
        if not math.isfinite(grad_norm):
            raise NonFiniteError(f"the gradient norm is {grad_norm}")
        return grad_norm

    def train(self) -> None:
        self.reload()
        self._deepspeed.train()

    def eval(self) -> None:
        """Switch to evaluation. If the config says so, optimizer states stay in host memory until :meth:`train`."""
        self._deepspeed.eval()
        if self.config.offload_optimizer_states and self.device.type != "cpu":
            self._states.offload()

    def offload(self, *, keep_weights: bool = False) -> None:
        """Move weights, masters, gradients and optimizer states to host memory, and free the device's; :meth:`reload` brings
        every bit back. Meanwhile :meth:`snapshot`, :meth:`load` and :meth:`named_weights` work, a forward does not.

        Args:
            keep_weights: leave the weights on the device, or bring them back, for forwards without gradients.
        """
        self._states.offload()
        if keep_weights:
            self._weights.reload()
        else:
            if self._sharded:
                settle(self._deepspeed)
            self._weights.offload()

    def reload(self) -> None:
        self._weights.reload()
        self._states.reload()

    @property
    def _sharded(self) -> bool:
        return bool(self._deepspeed.zero_optimization_partition_weights())

    def _state_tensors(self) -> Iterator[Tensor]:
        weights = {address(tensor) for tensor in weights_of(self.module)}
        gradients = (each.grad for each in self.module.parameters() if each.grad is not None)
        for tensor in (*deepspeed_private.tensors_of(self._optimizer), *gradients):
            if address(tensor) not in weights:
                yield tensor

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Make offloaded tensors readable in the block: in host memory, or on the device for weights that ZeRO-3 gathers."""
        away = self._weights.away
        if self._sharded:
            settle(self._deepspeed)
            self._weights.reload()
        with self._states.shown(), self._weights.shown():
            yield
        if self._sharded and away:
            self.offload()

    def named_weights(self, *, to_first: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and persistent buffer of the module, whole, under its checkpoint name; tied ones under each name.

        ZeRO-3 shards parameters, so a few are gathered at a time. Every rank iterates over all of them; with ``to_first`` only
        the first rank receives them. Offloaded weights are tensors in host memory.
        """
        with self._readable():
            weights = self.module.state_dict(keep_vars=True).items()
            yield from whole_weights(weights, self.device, to_first=to_first)

    def hf_weights(self, *, to_first: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The tensors of :meth:`named_weights` under the names of the Hugging Face model ``module.hf``, adapters merged."""
        weights = ((name.removeprefix("hf."), tensor) for name, tensor in self.named_weights(to_first=to_first))
        return merged(weights, self.module.hf)

    def snapshot(self) -> Snapshot:
        """Copy trained weights, optimizer, schedule and counters to host memory; every rank calls this, and writes its copy."""
        with self._readable():
            self._deepspeed.save_checkpoint(
                str(FOLDER), tag=CHECKPOINT_TAG, save_latest=False, exclude_frozen_parameters=self._partly_frozen
            )
        return self._deepspeed.checkpoint_engine.taken()

    def load(self, directory: Path) -> None:
        """Load a snapshot from ``directory``, taken with this or another ZeRO stage and number of ranks, exactly to the bit.

        Every rank calls this, and reads the files of all ranks.

        Raises:
            UserError: the checkpoint has another dtype or model, or one of its files holds something other than data; in the
                last case nothing has changed on any rank.
        """
        if unreadable := unreadable_files(directory):
            raise UserError(
                f"the checkpoint in {directory} cannot be loaded: {unreadable[0]} {NOT_DATA}; bring it back from a copy, or "
                "remove this checkpoint to resume from the one before it"
            )
        weights_away, states_away = self._weights.away, self._states.away
        self.reload()
        saved = Saved(directory / CHECKPOINT_TAG)
        if saved.fits(self._deepspeed):
            self._deepspeed.load_checkpoint(
                str(directory), tag=CHECKPOINT_TAG, load_module_strict=not self._partly_frozen
            )
        else:
            load_reshaped(self._deepspeed, saved)
        deepspeed_private.relink_optimizer_states(self._optimizer)
        follow_config(self._scheduler, self.config.optim)
        if states_away:
            self.offload(keep_weights=not weights_away)


def sharded(module: nn.Module, config: EngineConfig, device: torch.device) -> Callable[..., Any]:
    """The forward of ``module``, in host memory and never trained, with its weights sharded as in ZeRO stage 3. All ranks must
    call it equally often."""
    generated = _deepspeed_config(config, module, device)
    place(module, generated, device)
    forward, *_ = deepspeed.initialize(model=module, config=generated, dist_init_required=False)
    use_sharded_heads(module)
    forward.eval()
    return forward  # type: ignore[no-any-return]


def _deepspeed_config(config: EngineConfig, module: nn.Module, device: torch.device) -> dict[str, Any]:
    # DeepSpeed allocates its default buckets of 500 M elements in full, however small the model is.
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    bucket = max(2, min(BUCKET_ELEMENTS, trained))
    bucket += bucket % 2  # DeepSpeed requires an even number
    cuda = device.type == "cuda"
    host = {"device": "cpu", "pin_memory": cuda}
    generated = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # backward() accumulates, step() is the boundary: micro-batches vary in number
        "gradient_clipping": config.gradient_clip_val if config.zero_stage else 0.0,  # else PlainAdamW clips
        "zero_optimization": {
            "stage": config.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": config.zero_stage == 3 and cuda and not torch.are_deterministic_algorithms_enabled(),
            "zero_hpz_partition_size": config.zero_hpz_partition_size,
            **({"offload_optimizer": host} if config.offload_optimizer else {}),
            **({"offload_param": host} if config.offload_parameters else {}),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW is also fused on a CPU, and needs no compilation
        "bf16": {"enabled": is_bf16(module) and config.zero_stage > 0},  # else PlainAdamW has the masters
        "steps_per_print": 10**9,
    }
    whole_config: Any = OmegaConf.to_container(OmegaConf.merge(generated, config.deepspeed))
    return dict(whole_config)

"""Loads a checkpoint that was taken with another ZeRO stage or number of ranks, exactly to the bit.

DeepSpeed's files are memory-mapped: each rank reads its ranges of the trained parameters out of all shards, and hands DeepSpeed
the shard that it would have written itself. Nothing is converted on disk.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import constants as ds  # type: ignore[import-untyped]
from torch import Size, Tensor, nn

from nemo_style_rlhf.engine import deepspeed_private
from nemo_style_rlhf.engine.files import read
from nemo_style_rlhf.engine.plain_adamw import MASTERS
from nemo_style_rlhf.errors import UserError

WEIGHT, MOMENTS = "fp32", ("exp_avg", "exp_avg_sq")
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""File names for ZeRO 0 to 2, and for ZeRO 3."""
ZERO12_KEYS = ds.SINGLE_PARTITION_OF_FP32_GROUPS, ds.BASE_OPTIMIZER_STATE
SHARD_KEYS = {1: ZERO12_KEYS, 2: ZERO12_KEYS, 3: (ds.FP32_FLAT_GROUPS, ds.OPTIMIZER_STATE_DICT)}
"""By ZeRO stage, the keys of a shard's flat weights and of torch's optimizer state dict; the latter numbers the flat weights."""


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a flattened parameter that are also consecutive in a flat tensor."""

    parameter: str
    begin: int
    """Position of the first element in the parameter."""
    length: int
    offset: int
    """Position of the first element in the flat tensor."""


class Saved:
    """A snapshot on disk. ``model`` is DeepSpeed's file of buffers, counters, schedule and, below ZeRO 3, weights."""

    def __init__(self, directory: Path) -> None:
        """Open the snapshot in ``directory``.

        Raises:
            FileNotFoundError: there is none.
        """
        path = next((directory / name for name in MODEL_FILES if (directory / name).is_file()), None)
        if path is None:
            raise FileNotFoundError(f"there is no DeepSpeed checkpoint in {directory}")
        self.directory = directory
        self.model = read(path, mmap=True)
        config = self.model["ds_config"]
        self.zero_stage: int = config["zero_optimization"].get("stage", 0)
        self.sub_group: int | None = config["zero_optimization"].get("sub_group_size")
        self.ranks: int = self.model["dp_world_size"]
        self.bf16: bool = config.get("bf16", {}).get("enabled", False) or MASTERS in (self.model["optimizer"] or ())

    def fits(self, engine: Any) -> bool:
        """True if a DeepSpeed engine has the stage, ranks and flat tensors of this snapshot, so that each rank finds its shard.

        Raises:
            UserError: the dtypes differ.
        """
        if self.bf16 != is_bf16(engine.module):
            was, now = ("bfloat16" if bf16 else "float32" for bf16 in (self.bf16, not self.bf16))
            raise UserError(
                f"the checkpoint in {self.directory} was taken with model.dtype={was}, this is {now}: resume it with {was}"
            )
        sub_group = engine.config["zero_optimization"].get("sub_group_size")
        shape = engine.zero_optimization_stage(), engine.dp_world_size, sub_group
        return (self.zero_stage, self.ranks, self.sub_group) == shape

    def shard(self, rank: int) -> dict[str, Any]:
        """The optimizer's state dict that a rank wrote (ZeRO 1 to 3)."""
        name = f"{'bf16_' if self.bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        shard: dict[str, Any] = read(self.directory / name, mmap=True)["optimizer_state_dict"]
        return shard


class Whole:
    """Reads ranges of whole parameters, as fp32 weights and moments, from the shards of all ranks."""

    def __init__(self, saved: Saved, shapes: dict[str, Size]) -> None:
        """``shapes`` holds the shapes of the trained parameters, in the module's order.

        Raises:
            UserError: the checkpoint holds other parameters.
        """
        self.step: Tensor | None = None
        """Adam's count of optimizer steps; None before the first step, when there are no moments either."""
        self._found: dict[str, list[tuple[Piece, dict[str, Tensor]]]] = defaultdict(list)
        if saved.zero_stage == 0:
            self._add_plain(saved.model, list(shapes))
        for rank in range(saved.ranks if saved.zero_stage else 0):
            shard = saved.shard(rank)
            if saved.zero_stage == 3:
                pieces = _zero3_pieces(saved.model[ds.PARAM_SHAPES], rank, saved.ranks)
            else:
                pieces = self._zero12_pieces(shard[ds.PARAM_SLICE_MAPPINGS])
            self._add(pieces, *(shard[key] for key in SHARD_KEYS[saved.zero_stage]))
        found = {name: sum(piece.length for piece, _ in pieces) for name, pieces in self._found.items()}
        if found != {name: shape.numel() for name, shape in shapes.items()}:
            raise UserError(
                f"the checkpoint in {saved.directory} is of a model with other trained parameters: resume it with the model.path "
                "and model.lora it was taken with"
            )

    def _add_plain(self, model: dict[str, Any], names: list[str]) -> None:
        """Add weights of ZeRO 0: torch's optimizer numbers the trained parameters in the module's order."""
        own = [model["module"][name] for name in names if name in model["module"]]
        weights = [weight.flatten() for weight in model["optimizer"].get(MASTERS, own)]
        if len(names) == len(own) == len(model["optimizer"]["param_groups"][0]["params"]):
            pieces = [[Piece(name, 0, weight.numel(), 0)] for name, weight in zip(names, weights, strict=True)]
            self._add(pieces, weights, model["optimizer"])

    def _add(self, pieces: Sequence[list[Piece]], weights: Sequence[Tensor], optimizer: dict[str, Any]) -> None:
        """Add flat tensors with the pieces of each, and torch's state dict of their optimizer."""
        (self.param_group,) = optimizer["param_groups"]
        for index, (of_flat, weight) in enumerate(zip(pieces, weights, strict=True)):
            state = optimizer["state"].get(index, {})
            self.step = state.get("step", self.step)
            flats = {WEIGHT: weight, **{name: state[name].flatten() for name in MOMENTS if name in state}}
            for piece in of_flat:
                self._found[piece.parameter].append((piece, flats))

    def _zero12_pieces(self, mappings: list[dict[str, Any]]) -> list[list[Piece]]:
        """Pieces in the order of the ranks: a parameter that crosses the end of one rank's tensor continues in the next."""
        return [
            [
                Piece(name, sum(piece.length for piece, _ in self._found[name]), address.numel, address.start)
                for name, address in mapping.items()
            ]
            for mapping in mappings
        ]

    def read(self, kind: str, wanted: Piece, into: Tensor) -> None:
        """Copy ``wanted`` of the weights or of a moment to its offset in the flat tensor ``into``."""
        for piece, flats in self._found[wanted.parameter]:
            begin = max(piece.begin, wanted.begin)
            length = min(piece.begin + piece.length, wanted.begin + wanted.length) - begin
            if length > 0 and kind in flats:
                source = flats[kind].narrow(0, piece.offset + begin - piece.begin, length)
                into.narrow(0, wanted.offset + begin - wanted.begin, length).copy_(source)

    def load(self, trained: dict[str, Any]) -> None:
        """Copy the weights of whole parameters, by name."""
        for name, weight in trained.items():
            flat = torch.empty(weight.numel())
            self.read(WEIGHT, Piece(name, 0, weight.numel(), 0), into=flat)
            weight.data.copy_(flat.view_as(weight))


def is_bf16(module: nn.Module) -> bool:
    """True if ``module`` has bf16 weights; some models keep a few in fp32."""
    return next(module.parameters()).dtype == torch.bfloat16


def load_weights(hf: nn.Module, directory: Path, *, prefix: str) -> None:
    """Load the trained parameters and the buffers of the snapshot in ``directory`` into a model without an engine.

    Args:
        prefix: beginning of the model's names in the snapshot.

    Raises:
        UserError: the snapshot belongs to another model, or one of its files holds something other than data.
    """
    saved = Saved(directory)
    trained = {f"{prefix}{name}": weight for name, weight in hf.named_parameters() if weight.requires_grad}
    Whole(saved, {name: weight.shape for name, weight in trained.items()}).load(trained)
    for name in saved.model[ds.BUFFER_NAMES]:
        if name.startswith(prefix):
            hf.get_buffer(name.removeprefix(prefix)).copy_(saved.model["module"][name])


def load_reshaped(engine: Any, saved: Saved) -> None:
    """Load the state in ``saved`` into a DeepSpeed engine with another stage or number of ranks; every rank calls this.

    Raises:
        UserError: the checkpoint belongs to another model.
    """
    stage = engine.zero_optimization_stage()
    trained = {name: weight for name, weight in engine.module.named_parameters() if weight.requires_grad}
    whole = Whole(saved, {name: getattr(weight, "ds_shape", weight.shape) for name, weight in trained.items()})
    if stage == 3:
        engine.optimizer.checkpoint_event_prologue()
    else:
        whole.load(trained)
    for name in saved.model[ds.BUFFER_NAMES]:
        engine.module.get_buffer(name).copy_(saved.model["module"][name])
    _load_optimizer(engine, whole, trained)
    if stage == 3:
        engine.optimizer.checkpoint_event_epilogue()
    engine.lr_scheduler.load_state_dict(saved.model["lr_scheduler"])
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, counter, saved.model[counter])


def _load_optimizer(engine: Any, whole: Whole, trained: dict[str, Any]) -> None:
    """Load optimizer states as DeepSpeed does from a rank's own shard."""
    stage, own = engine.zero_optimization_stage(), engine.optimizer.state_dict()
    flats = _own_flats(engine, own, trained)

    def filled(kind: str) -> list[Tensor]:
        tensors = [torch.zeros(shape.numel()) for _, shape in flats]
        for tensor, (pieces, _) in zip(tensors, flats, strict=True):
            for piece in pieces:
                whole.read(kind, piece, into=tensor)
        return [tensor.view(shape) for tensor, (_, shape) in zip(tensors, flats, strict=True)]

    states = {}
    if whole.step is not None:
        for index, moments in enumerate(zip(*(filled(kind) for kind in MOMENTS), strict=True)):
            states[index] = {"step": whole.step.clone(), **dict(zip(MOMENTS, moments, strict=True))}
    group = {**whole.param_group, "params": list(range(len(flats)))}
    optimizer = {"state": states, "param_groups": [group]}
    if stage == 0:
        masters = {MASTERS: filled(WEIGHT)} if MASTERS in own else {}
        engine.optimizer.load_state_dict(optimizer | masters)
        return
    weights_key, optimizer_key = SHARD_KEYS[stage]
    shard = {**own, weights_key: filled(WEIGHT), optimizer_key: optimizer}
    engine.optimizer.load_state_dict([shard] * engine.dp_world_size, load_from_fp32_weights=True)


def _own_flats(engine: Any, own: dict[str, Any], trained: dict[str, Any]) -> list[tuple[list[Piece], Size]]:
    """Pieces and shape of each flat tensor in this rank's optimizer, whose state dict is ``own``."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return [([Piece(name, 0, weight.numel(), 0)], weight.shape) for name, weight in trained.items()]
    weights = own[SHARD_KEYS[stage][0]]
    if stage == 3:
        groups = _zero3_pieces(
            deepspeed_private.parameter_shapes(engine), torch.distributed.get_rank(), engine.dp_world_size
        )
        return [(pieces, flat.shape) for pieces, flat in zip(groups, weights, strict=True)]
    mappings = [(name, deepspeed_private.fragment(weight)) for name, weight in trained.items()]
    places = [
        (name, mapping.lp_fragment_address, mapping.hp_fragment_address)
        for name, mapping in mappings
        if mapping is not None
    ]
    pieces = [Piece(name, low.start, low.numel, high.start) for name, low, high in places]
    ((flat, padding),) = zip(weights, own[ds.GROUP_PADDINGS], strict=True)
    return [(pieces, Size([flat.numel() + padding]))]


def _zero3_pieces(shapes: list[dict[str, Size]], rank: int, ranks: int) -> list[list[Piece]]:
    """Pieces of a rank: ZeRO-3 cuts every parameter into one equal part per rank, the last ones padded or empty."""
    pieces = []
    for group in shapes:
        offset = 0
        of_group = []
        for name, shape in group.items():
            part = ceil(shape.numel() / ranks)
            of_group.append(Piece(name, rank * part, max(0, min(part, shape.numel() - rank * part)), offset))
            offset += part
        pieces.append(of_group)
    return pieces

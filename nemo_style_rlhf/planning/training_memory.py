"""Bytes of a trained model and its update.

``trained`` is the number of trained elements, ``width`` their size in bytes (2 in bf16, 4 in fp32), ``ranks`` the number of ranks
that shard them. Sizes of shards follow ZeRO (arXiv 1910.02054, figure 1); sizes of buffers were read from DeepSpeed 0.19.8,
``zero/stage_1_and_2.py`` and ``zero/stage3.py``.
"""

from collections import Counter

from nemo_style_rlhf.planning.blueprint import Blueprint
from nemo_style_rlhf.planning.device import Device
from nemo_style_rlhf.planning.phases import Phase
from nemo_style_rlhf.schema.common import BUCKET_ELEMENTS, EngineConfig

MASTER = 4
"""Bytes of an fp32 master element. DeepSpeed's stages 1 to 3 clone even fp32 weights (``single_partition_of_fp32_groups``)."""
ADAM = 8
"""Bytes of exp_avg and exp_avg_sq in fp32."""
NORM = 8
"""Bytes of an fp64 element of the norm."""
MAX_LIVE = 10**9
"""Elements that ZeRO-3 keeps gathered: ``stage3_max_live_parameters``, also the distance within which it looks for reuse."""
SUB_GROUP = 10**9
"""Elements of a shard that ZeRO-3 updates at a time: ``sub_group_size``."""


def masters(trained: int, width: int, *, stage: int, ranks: int) -> int:
    """Bytes of the masters; without ZeRO, fp32 weights are their own (engine/plain_adamw.py)."""
    return MASTER * trained // ranks if stage else converted(trained, width)


def converted(elements: int, width: int) -> int:
    """Bytes of ``elements`` in fp32, 0 if they are in fp32 already."""
    return MASTER * elements if width < MASTER else 0


def optimizer_states(trained: int, *, stage: int, ranks: int) -> int:
    return ADAM * trained // (ranks if stage else 1)


def weights(trained: int, frozen: int, width: int, *, stage: int, ranks: int) -> int:
    """Bytes of the model in its dtype; ZeRO-3 holds a shard, and the part of the model that it keeps gathered."""
    if stage < 3:
        return (trained + frozen) * width
    return trained * width // ranks + min(trained, MAX_LIVE) * width


def frozen_weights(model: Blueprint, engine: EngineConfig, *, ranks: int) -> int:
    """:func:`weights` of a model, in addition to the engine's, that is never trained."""
    if engine.zero_stage < 3:
        return model.base_weights
    return model.base_weights // ranks + min(model.base_weights, MAX_LIVE * model.width)


def gradients(trained: int, width: int, *, stage: int, ranks: int) -> int:
    """Bytes of the gradients that add up between optimizer steps, in the weights' dtype; from ZeRO-2 on, of one shard only."""
    return trained * width // (ranks if stage >= 2 else 1)


def step_buffers(trained: int, width: int, *, stage: int, ranks: int) -> dict[str, int]:
    """Bytes that an optimizer step takes besides the gradients, in the order of allocation.

    Without ZeRO the gradients are flattened once, for the reduction over ranks, and copied if they are not in fp32. With ZeRO:
    the bucket into which they are copied (``reduce_bucket_size``, see engine.py), its flattened copy if several ranks reduce it,
    the rank's shard of the result, the flattened shard, and its fp32 copy if it is not in fp32.
    """
    if stage == 0:
        return {"reduction": trained * width, "fp32": converted(trained, width)}
    shard = trained * width // ranks
    bucket = min(trained, BUCKET_ELEMENTS) * width
    return {
        "bucket": bucket,
        "reduction": bucket if ranks > 1 else 0,
        "shard": shard,
        "flat": shard,
        "fp32": converted(trained // ranks, width),
    }


def kept_for_gradients(trained: int, width: int, *, ranks: int, offload: bool) -> int:
    """Bytes that ZeRO-3 holds on a GPU for the engine's whole life (``_setup_for_real_optimizer``): bucket and rank's shard."""
    return (min(trained, BUCKET_ELEMENTS) + (0 if offload else trained // ranks)) * width


def backward_buffers(trained: int, largest: int, width: int, *, stage: int, ranks: int, offload: bool) -> int:
    """Bytes of gradients and their buffers on a GPU in any backward of a step but the first.

    From ZeRO-1 on, the first gradient allocates the bucket (``setup_buckets``). ZeRO-2 reduces in every backward: with a
    flattened copy if there are several ranks (``allreduce_bucket``), into a new shard that is then added to the shard of earlier
    backwards (``copy_grads_in_partition``). ZeRO-3 already has bucket and shard, and makes a copy for any number of ranks
    (``reduce_scatter_coalesced``). With ``offload``, shards are in host memory, except for a tensor in transit.
    """
    bucket = min(trained, BUCKET_ELEMENTS) * width
    moving = largest * width if offload else 0
    if stage == 3:
        return bucket + moving
    if stage == 2:
        return bucket * (2 if ranks > 1 else 1) + (moving or 2 * (trained * width // ranks))
    return trained * width + (bucket if stage else 0)


def optimizer_step_buffers(trained: int, largest: int, width: int, *, stage: int, ranks: int, offload: bool) -> int:
    """Peak bytes of gradients and their copies on a GPU in an optimizer step.

    ZeRO-0 flattens one bucket of gradients at a time (``buffered_allreduce_fallback``); then fp32 gradients take the place of
    others (engine/plain_adamw.py). ZeRO-1 reduces in the step (``reduce_ipg_grads``): the first bucket is allocated while all
    gradients exist, the shard once a bucket of them is freed. Then the shard, its flattened copy and, if it is not in fp32, its
    fp32 copy exist at once; ZeRO-3 already has its shard, and takes a sub-group at a time
    (``_prepare_fp32_grad_for_sub_group``). The norm of the shard is computed before that.
    """
    whole, bucket = trained * width, min(trained, BUCKET_ELEMENTS) * width
    if stage == 0:
        return max(whole + bucket, converted(trained, width))
    mine = 0 if offload else trained // ranks
    shard = mine * width if stage < 3 else 0
    copies = min(mine, SUB_GROUP if stage == 3 else mine) * (width + converted(1, width))
    norm = NORM * largest  # tensors are copied to fp64 one by one (get_norm_dtype)
    return max(whole + max(bucket, shard) if stage == 1 else 0, shard + max(copies, norm))


def checkpoint_copy(trained: int, width: int, *, stage: int, ranks: int) -> int:
    """Bytes of the first rank's snapshot (engine/snapshot.py), including the weights, until it is written."""
    states = masters(trained, width, stage=stage, ranks=ranks) + optimizer_states(trained, stage=stage, ranks=ranks)
    return states + (trained * width if stage < 3 else 0)


def trained_model(
    model: Blueprint, engine: EngineConfig, device: Device, *, ranks: int, libraries: int
) -> Counter[str]:
    """Bytes of ``model`` that one rank holds from start to end."""
    sharding: dict[str, int] = {"stage": engine.zero_stage, "ranks": ranks}
    held = Counter(
        {
            "libraries": libraries,
            "weights": weights(model.trained, model.elements - model.trained, model.width, **sharding),
        }
    )
    if engine.zero_hpz_partition_size > 1:
        held["weights within the node"] = model.trained * model.width // engine.zero_hpz_partition_size
    if engine.offload_parameters and device.cuda:
        held["weights"] -= model.trained * model.width // ranks
    if engine.zero_stage == 3 and device.cuda:
        held["gradients"] = kept_for_gradients(
            model.trained, model.width, ranks=ranks, offload=engine.offload_optimizer
        )
    if not (engine.offload_optimizer and device.cuda):
        held["fp32 masters"] = masters(model.trained, model.width, **sharding)
        held["optimizer states"] = optimizer_states(model.trained, **sharding)
    return held


def resting(engine: EngineConfig, held: Counter[str]) -> Counter[str]:
    """The part of ``held`` that stays on a GPU while nothing is trained."""
    if engine.offload_optimizer_states:
        return Counter({name: size for name, size in held.items() if name not in ("fp32 masters", "optimizer states")})
    return held


def training_phases(
    model: Blueprint,
    engine: EngineConfig,
    device: Device,
    held: Counter[str],
    inference: dict[str, Counter[str]],
    update: Counter[str],
    *,
    ranks: int,
) -> list[Phase]:
    """The phases of a step, including the permanently ``held`` bytes.

    On a GPU each phase frees its memory for the next. On a CPU the heap keeps it (launch/malloc.py), and larger blocks of the
    next phase do not fit between small blocks that stay, so the bytes of all phases and every buffer of the optimizer step add
    up. There are two exceptions: the norm's copies, one tensor each, fit into freed activations, and a checkpoint's copy, a few
    large blocks, fits into the adjacent freed buffers of the optimizer step; any excess comes on top. Without ZeRO the blocks of
    the checkpoint's copy hold one tensor each, too.
    """
    sharding: dict[str, int] = {"stage": engine.zero_stage, "ranks": ranks}
    accumulated = Counter({"gradients": gradients(model.trained, model.width, **sharding)})
    buffers = step_buffers(model.trained, model.width, **sharding)
    if not device.cuda:
        kept = sum(inference.values(), start=update)
        room = sum(buffers.values()) + (0 if engine.zero_stage else kept.total())
        copied = checkpoint_copy(model.trained, model.width, **sharding) - room
        step = Counter({"optimizer step": sum(buffers.values()), "checkpoint": max(0, copied)})
        return [Phase("update", held + accumulated + kept + step)]
    sizes = (model.trained, model.largest, model.width)
    backward = backward_buffers(*sizes, **sharding, offload=engine.offload_optimizer)
    step_peak = optimizer_step_buffers(*sizes, **sharding, offload=engine.offload_optimizer)
    loading = Counter({"libraries": held["libraries"], "weights": model.elements * model.width})
    return [
        *([Phase("loading", loading)] if engine.zero_stage == 3 else []),  # sharded once it is on the device
        *(Phase(name, resting(engine, held) + part) for name, part in inference.items()),
        Phase("forward and backward", held + update + Counter({"gradients": backward})),
        Phase("optimizer step", held + Counter({"optimizer step": step_peak})),
    ]

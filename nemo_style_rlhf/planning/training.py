"""Bytes of a trained model and its update.

``trained`` counts the elements that learn, ``width`` their bytes (2 in bf16, 4 in fp32), ``ranks`` those that share. The shares
are those of ZeRO (arXiv 1910.02054, figure 1); the buffers were read from DeepSpeed 0.19.8, ``zero/stage_1_and_2.py`` and
``zero/stage3.py``.
"""

from collections import Counter

from nemo_style_rlhf.planning.blueprint import Blueprint
from nemo_style_rlhf.planning.device import Device
from nemo_style_rlhf.planning.phases import Phase
from nemo_style_rlhf.schema.common import BUCKET_ELEMENTS, EngineConfig

MASTER = 4
"""fp32, also where the weights are fp32: DeepSpeed's stages 1 to 3 clone them (``single_partition_of_fp32_groups``)."""
ADAM = 8
"""exp_avg and exp_avg_sq in fp32."""
NORM = 8
"""fp64."""
MAX_LIVE = 10**9
"""Elements that ZeRO-3 keeps gathered: ``stage3_max_live_parameters``, which is as far apart as it looks for another use."""
SUB_GROUP = 10**9
"""Elements of a share that ZeRO-3 steps at a time: ``sub_group_size``."""


def masters(trained: int, *, stage: int, ranks: int) -> int:
    return MASTER * trained // ranks if stage else 0


def optimizer_states(trained: int, *, stage: int, ranks: int) -> int:
    return ADAM * trained // (ranks if stage else 1)


def weights(trained: int, frozen: int, width: int, *, stage: int, ranks: int) -> int:
    """Bytes of the model in its dtype; ZeRO-3 holds a shard, and as much of the whole as it keeps gathered."""
    if stage < 3:
        return (trained + frozen) * width
    return trained * width // ranks + min(trained, MAX_LIVE) * width


def gradients(trained: int, width: int, *, stage: int, ranks: int) -> int:
    """That add up between two optimizer steps, in the weights' dtype; from ZeRO-2 on a rank keeps those of its share."""
    return trained * width // (ranks if stage >= 2 else 1)


def step_buffers(trained: int, width: int, *, stage: int, ranks: int) -> dict[str, int]:
    """What an optimizer step takes beside the gradients, in the order in which it does.

    Without ZeRO the gradients are flattened once, for the reduction over ranks. With it: the bucket they are copied into
    (``reduce_bucket_size``, see engine.py), its flattened copy where several ranks reduce it, the rank's share of the result,
    that share flattened, and the same in fp32 where it is not yet.
    """
    if stage == 0:
        return {"reduction": trained * width}
    share = trained * width // ranks
    bucket = min(trained, BUCKET_ELEMENTS) * width
    return {
        "bucket": bucket,
        "reduction": bucket if ranks > 1 else 0,
        "share": share,
        "flat": share,
        "fp32": MASTER * trained // ranks if width < MASTER else 0,
    }


def kept_for_gradients(trained: int, width: int, *, ranks: int, offload: bool) -> int:
    """What ZeRO-3 has on a GPU for the engine's whole life (``_setup_for_real_optimizer``): the bucket, and the rank's share."""
    return (min(trained, BUCKET_ELEMENTS) + (0 if offload else trained // ranks)) * width


def backward_buffers(trained: int, largest: int, width: int, *, stage: int, ranks: int, offload: bool) -> int:
    """Gradients on a GPU in a backward that is not a step's first, and what they pass through.

    From ZeRO-1 on the first gradient makes the bucket (``setup_buckets``). ZeRO-2 reduces in every backward: with a flattened
    copy where ranks are several (``allreduce_bucket``), into a share of its own that is then added to that of earlier ones
    (``copy_grads_in_partition``). ZeRO-3, which has bucket and share already, copies for any number of ranks
    (``reduce_scatter_coalesced``). With ``offload`` shares are in host memory, apart from a tensor on its way there.
    """
    bucket = min(trained, BUCKET_ELEMENTS) * width
    moving = largest * width if offload else 0
    if stage == 3:
        return bucket + moving
    if stage == 2:
        return bucket * (2 if ranks > 1 else 1) + (moving or 2 * (trained * width // ranks))
    return trained * width + (bucket if stage else 0)


def optimizer_step_buffers(trained: int, largest: int, width: int, *, stage: int, ranks: int, offload: bool) -> int:
    """Gradients and their copies on a GPU when an optimizer step holds most.

    ZeRO-0 flattens as many as a bucket has (``buffered_allreduce_fallback``). ZeRO-1 reduces now (``reduce_ipg_grads``): the
    first bucket is made while all gradients are there, and the share when a bucket of them is not any more. Then the share, the
    same flattened and in fp32 where it is not yet are there at once; ZeRO-3, which has its share already, takes a sub-group at a
    time (``_prepare_fp32_grad_for_sub_group``). The norm is taken before, of the share.
    """
    whole, bucket = trained * width, min(trained, BUCKET_ELEMENTS) * width
    if stage == 0:
        return whole + bucket
    mine = 0 if offload else trained // ranks
    share = mine * width if stage < 3 else 0
    copies = min(mine, SUB_GROUP if stage == 3 else mine) * (width + (MASTER if width < MASTER else 0))
    norm = NORM * largest  # one tensor after the other is copied to fp64 (get_norm_dtype)
    return max(whole + max(bucket, share) if stage == 1 else 0, share + max(copies, norm))


def checkpoint_copy(trained: int, width: int, *, stage: int, ranks: int) -> int:
    """What a rank's snapshot holds until it is written (engine/snapshot.py), of the first rank, which has the weights, too."""
    states = masters(trained, stage=stage, ranks=ranks) + optimizer_states(trained, stage=stage, ranks=ranks)
    return states + (trained * width if stage < 3 else 0)


def trained_model(
    model: Blueprint, engine: EngineConfig, device: Device, *, ranks: int, libraries: int
) -> Counter[str]:
    """What one rank holds of it from its start to its end."""
    share: dict[str, int] = {"stage": engine.zero_stage, "ranks": ranks}
    held = Counter(
        {
            "libraries": libraries,
            "weights": weights(model.trained, model.elements - model.trained, model.width, **share),
        }
    )
    if engine.offload_parameters and device.cuda:
        held["weights"] -= model.trained * model.width // ranks
    if engine.zero_stage == 3 and device.cuda:
        held["gradients"] = kept_for_gradients(
            model.trained, model.width, ranks=ranks, offload=engine.offload_optimizer
        )
    if not (engine.offload_optimizer and device.cuda):
        held["fp32 masters"] = masters(model.trained, **share)
        held["optimizer states"] = optimizer_states(model.trained, **share)
    return held


def resting(engine: EngineConfig, held: Counter[str]) -> Counter[str]:
    """What is left of ``held`` on a GPU while nothing is trained."""
    if engine.offload_optimizer_states and engine.zero_stage in (1, 2):
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
    """The phases of a step, beside what is ``held`` all the time.

    On a GPU each frees its memory for the next. On a CPU the heap keeps it (launch/malloc.py), and the larger blocks of the next
    find no room between small ones that stay: so there what all phases take, and every buffer of the optimizer step, add up. Only
    the norm's copies, of a tensor each, fit where activations were, and a checkpoint's copy, of few and large blocks, where the
    optimizer step's were side by side; what is more comes on top. Without ZeRO the copy's blocks are of a tensor each, too.
    """
    share: dict[str, int] = {"stage": engine.zero_stage, "ranks": ranks}
    learned = Counter({"gradients": gradients(model.trained, model.width, **share)})
    buffers = step_buffers(model.trained, model.width, **share)
    if not device.cuda:
        kept = sum(inference.values(), start=update)
        room = sum(buffers.values()) + (0 if engine.zero_stage else kept.total())
        copied = checkpoint_copy(model.trained, model.width, **share) - room
        step = Counter({"optimizer step": sum(buffers.values()), "checkpoint": max(0, copied)})
        return [Phase("update", held + learned + kept + step)]
    sizes = (model.trained, model.largest, model.width)
    backward = backward_buffers(*sizes, **share, offload=engine.offload_optimizer)
    step_peak = optimizer_step_buffers(*sizes, **share, offload=engine.offload_optimizer)
    loading = Counter({"libraries": held["libraries"], "weights": model.elements * model.width})
    return [
        *([Phase("loading", loading)] if engine.zero_stage == 3 else []),  # it is shared out once it is on the device
        *(Phase(name, resting(engine, held) + part) for name, part in inference.items()),
        Phase("forward and backward", held + update + Counter({"gradients": backward})),
        Phase("optimizer step", held + Counter({"optimizer step": step_peak})),
    ]

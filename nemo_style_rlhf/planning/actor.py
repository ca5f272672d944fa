"""Plans the memory of the actor and of its generation engines."""

from collections import Counter

from nemo_style_rlhf.data.ragged import padded_rows, round_up
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.transfer import BUCKET_BYTES
from nemo_style_rlhf.models.cpu_linear import CPU_EMULATES_BF16
from nemo_style_rlhf.planning.blueprint import Blueprint, PlannedBatch
from nemo_style_rlhf.planning.device import Device
from nemo_style_rlhf.planning.phases import ACTOR, ENGINE, GIB, Phase, ProcessPlan
from nemo_style_rlhf.planning.training_memory import frozen_weights, resting, trained_model, training_phases
from nemo_style_rlhf.schema.generation import CPU_KV_CACHE_GIB
from nemo_style_rlhf.schema.plan import PlanConfig

PREFILL_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens of one vLLM step: default of max_num_batched_tokens for ``LLM`` in ``vllm/engine/arg_utils.py``."""


def plan_actor(
    config: PlanConfig, policy: Blueprint, reference: Blueprint | None, device: Device, *, prompt_length: int
) -> ProcessPlan:
    """Plan the actor, for prompts of at most ``prompt_length`` tokens.

    Args:
        reference: the reference, if it is a model of its own.
    """
    algorithm, response = config.algorithm, config.generation.max_length
    held = trained_model(policy, config.engine, device, ranks=config.ranks, libraries=device.libraries("actor"))
    offloaded = (config.model.reference == "cpu_offload" or config.placement.in_turns) and device.cuda
    if reference is not None and not offloaded:
        held["reference"] = frozen_weights(reference, config.engine, ranks=config.ranks)
    samples = algorithm.num_rollout_samples  # micro-batches are formed as for one rank, then shared
    generated = -(-samples // config.ranks) * config.generation.sharing_ranks
    transit = Counter({"weights in transit": _in_transit(config, policy, device)})
    rollout, loading, generator = Counter[str](), Counter[str](), Counter[str]()
    if not config.generation.engines.count:
        generator = _generator(config, policy, device, generated, prompt_length)
        rollout = _decoding(config, policy, device, generated, prompt_length)
    elif not device.cuda:  # in /dev/shm, which is memory of the host
        held["published weights"] = (algorithm.staleness + 1) * policy.base_weights // config.ranks
    held += generator
    if device.cuda:
        loading = Counter(resting(config.engine, held))
        loading["optimizer states"] = 0  # the first step allocates them
        if config.generation.backend == "vllm":
            # request_memory in vllm/v1/worker/utils.py requires the whole share to be free, even if the cache is smaller.
            loading["free for vLLM"] = max(0, _share(config, device) - generator.total())
    else:
        loading = held + Counter({"weights in transit": policy.on_disk})
    batch = _batch(config, samples, prompt_length, response)
    scoring = policy.inference(batch)
    if reference is not None:
        scoring = max(scoring, reference.inference(batch), key=Counter.total)  # one after the other
        scoring["reference"] = reference.base_weights if offloaded else 0
    update = policy.training(
        _batch(config, -(-samples // algorithm.mini_batches), prompt_length, response),
        with_entropy=algorithm.entropy_bonus != 0,
    )
    phases = [
        *([Phase("loading vLLM", loading)] if generator else []),
        *training_phases(
            policy, config.engine, device, held,
            {"rollout": rollout, "log-probabilities": scoring, "weights to vLLM": transit}, update, ranks=config.ranks,
        ),
        Phase("export", held + Counter({"weights in transit": 0 if device.cuda else _exported(config, policy)})),
    ]  # fmt: skip
    return ProcessPlan(ACTOR, tuple(phases), config.ranks)


def plan_engine(config: PlanConfig, policy: Blueprint, device: Device, *, prompt_length: int) -> ProcessPlan:
    """Plan each device of the generation engines. No other process uses it."""
    count = config.generation.engines.count
    generated = -(-config.algorithm.num_rollout_samples // count)
    held = Counter({"libraries": device.libraries("actor")})
    held += _generator(config, policy, device, generated, prompt_length)
    rollout = held + _decoding(config, policy, device, generated, prompt_length)
    transit = Counter({"weights in transit": _in_transit(config, policy, device)})
    return ProcessPlan(
        ENGINE,
        (Phase("rollout", rollout), Phase("new weights", held + transit)),
        count * config.generation.tensor_parallel_size,
    )


def _batch(config: PlanConfig, samples: int, prompt: int, response: int) -> PlannedBatch:
    """The micro-batch of ``micro_batch_iterator`` if all sequences are as long as the longest."""
    engine, length = config.engine, prompt + response
    rows = max(1, min(samples, engine.micro_batch_tokens // length))
    if not config.model.packing:
        rows = padded_rows(rows, length, multiple=engine.row_multiple or 8, token_budget=engine.micro_batch_tokens)
    return PlannedBatch(rows=rows, length=round_up(length, 8), actions=min(rows, samples) * response)


def _share(config: PlanConfig, device: Device) -> int:
    """Bytes of the GPU that vLLM may use."""
    return int(config.generation.gpu_memory_utilization * device.memory)


def _generator(config: PlanConfig, policy: Blueprint, device: Device, samples: int, prompt: int) -> Counter[str]:
    """Bytes of vLLM's weights and KV cache. On a GPU without ``kv_cache_gib``, both together fill vLLM's share of the GPU.

    If the CPU has no bf16 instructions, vLLM keeps a bf16 policy in fp32. On a CPU it keeps the matrix of the logits twice,
    plain and packed for its kernel (``UnquantizedEmbeddingMethod``), apart from a tied embedding.

    Raises:
        UserError: vLLM would not start, as the cache has no room for one sequence (``_check_enough_kv_cache_memory``).
    """
    generation = config.generation
    if generation.backend == "hf":
        tokens = min(samples, generation.max_num_seqs) * (prompt + generation.max_length)
        return Counter({"vLLM weights": policy.weights, "KV cache": tokens * policy.kv_bytes_per_token})
    emulated = CPU_EMULATES_BF16 and not device.cuda and policy.width == 2
    group_size, length = generation.tensor_parallel_size, prompt + generation.max_length
    weights = policy.base_weights * (2 if emulated else 1) // group_size
    sequence = length * policy.kv_bytes_per_token * (2 if emulated else 1) // group_size
    one = f"one sequence of {length} tokens takes {sequence / GIB:.2f} GiB"
    remedy = "raise it or generation.tensor_parallel_size, or lower data.max_prompt_length or generation.max_length"
    if device.cuda and generation.kv_cache_gib is None:
        share = _share(config, device)
        if weights + sequence > share:
            raise UserError(
                f"generation.gpu_memory_utilization={generation.gpu_memory_utilization:g} gives vLLM {share / GIB:.2f} GiB but "
                f"its weights take {weights / GIB:.2f} GiB and {one}: {remedy}"
            )
        return Counter({"vLLM weights": weights, "KV cache": share - weights})
    if not device.cuda:
        weights += policy.head * (2 if emulated else 1)
    gib = CPU_KV_CACHE_GIB if generation.kv_cache_gib is None else generation.kv_cache_gib
    if sequence > int(gib * GIB):
        raise UserError(f"generation.kv_cache_gib={gib:g} is too little, for {one}: {remedy}")
    return Counter({"vLLM weights": weights, "KV cache": int(gib * GIB)})


def _decoding(config: PlanConfig, policy: Blueprint, device: Device, samples: int, prompt: int) -> Counter[str]:
    """Bytes of vLLM besides weights and cache: a layer's activations for the tokens of one step, and the sampler's logits.

    A layer holds the residual, its input, gate and up projection and their product. The sampler (``vllm/v1/sample``) holds
    logits in the model's dtype and in fp32 and log-probabilities in fp32; on a GPU also probabilities and noise in fp32. With
    ``gpu_memory_utilization`` both are part of vLLM's share. ``generation.backend=hf`` reads all prompts at once.
    """
    hf = config.generation.backend == "hf"
    if device.cuda and config.generation.kv_cache_gib is None and not hf:
        return Counter()
    rows = min(samples, config.generation.max_num_seqs)
    step = config.generation.max_num_batched_tokens or PREFILL_TOKENS[device.kind]
    tokens = rows * prompt if hf else min(step, rows * prompt)
    return Counter(
        {
            "activations": tokens * (2 * policy.hidden + 3 * policy.intermediate) * policy.width,
            "logits": rows * policy.vocabulary * (policy.width + (16 if device.cuda else 8)),
        }
    )


def _in_transit(config: PlanConfig, policy: Blueprint, device: Device) -> int:
    """Bytes of the new weights of the largest layers (embedding and head), on a CPU also as packed for their kernel; plus a
    bucket if the sent tensors are copies of the engine's (merged adapters, gathered shards)."""
    layers = 2 * policy.head * (1 if device.cuda else 2)
    copies = config.model.lora.rank or config.engine.zero_stage == 3
    return layers + (min(policy.base_weights, BUCKET_BYTES) if copies else 0)


def _exported(config: PlanConfig, policy: Blueprint) -> int:
    """Bytes of an export: safetensors serializes the whole model before it writes; merged adapters need a copy before that."""
    copies = config.model.lora.rank or config.engine.zero_stage == 3
    return policy.base_weights * (2 if copies else 1)

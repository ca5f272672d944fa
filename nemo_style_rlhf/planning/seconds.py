"""Estimates the seconds of a step's rollout and of its training from FLOPs and bytes, for sequences of full length."""

from dataclasses import dataclass

from nemo_style_rlhf.planning.blueprint import Blueprint
from nemo_style_rlhf.rollout.version_schedule import overlap
from nemo_style_rlhf.schema.common import ModelConfig
from nemo_style_rlhf.schema.plan import PlanConfig

COMPUTE_SHARE = 0.4
"""Assumed share of device_tflops that matrix products reach (MFU: arXiv 2204.02311 has 0.46). Small models reach less."""
BANDWIDTH_SHARE = 0.6
"""Assumed share of device_gb_per_s with which decoding reads. Small models without CUDA graphs reach far less."""


@dataclass(frozen=True)
class Part:
    """The rollout or the training of one step."""

    seconds: float
    formula: str
    """The figures that ``seconds`` is computed from."""


def step_seconds(
    config: PlanConfig, policy: Blueprint, critic: Blueprint | None, *, prompt_length: int, cache: int,
    reference: Blueprint | None = None,
) -> str:  # fmt: skip
    """Both estimates with their figures, the part that staleness hides, and the number of engines that would make them equal.

    Args:
        critic: None if no critic is trained.
        prompt_length: length of the longest prompt in tokens.
        cache: bytes of the KV cache on one device.
        reference: the model in model.reference_path; None if it is null.
    """
    engines, size = config.generation.engines.count, config.generation.tensor_parallel_size

    def sampling(generators: int) -> Part:
        return rollout(config, policy, prompt_length=prompt_length, cache=cache, generators=generators)

    sampled = sampling(engines or config.ranks // size)
    trained = training(config, policy, critic, prompt_length=prompt_length, reference=reference)
    lines = [
        f"Estimated, not measured, at an assumed {COMPUTE_SHARE:.0%} of {config.device_tflops:g} TFLOP/s and "
        f"{BANDWIDTH_SHARE:.0%} of {config.device_gb_per_s:g} GB/s, less with small models, all sequences at full length:",
        f"  rollout  {sampled.seconds:.3g} s: {sampled.formula}",
        f"  training {trained.seconds:.3g} s: {trained.formula}",
        f"By this estimate, {overlap(sampled.seconds, trained.seconds, engines)}",
    ]
    counts = range(1, config.algorithm.num_rollout_samples + 1)
    enough = next((count for count in counts if sampling(count).seconds <= trained.seconds), None)
    lines.append(
        "No number of engines makes the rollout as short as training."
        if enough is None
        else f"From generation.engines.count={enough} on, the rollout takes no longer than training."
    )
    return "\n".join(lines)


def rollout(config: PlanConfig, policy: Blueprint, *, prompt_length: int, cache: int, generators: int) -> Part:
    """The rollout, shared by ``generators`` of tensor_parallel_size devices each. Prompts cost matrix products; a decoding step
    lasts as long as it reads weights and KV cache, or as its matrix products, whichever is longer. Excludes rewards, new weights
    and savings of the prefix cache."""
    assert config.device_gb_per_s is not None
    devices, response = config.generation.tensor_parallel_size, config.generation.max_length
    samples = -(-config.algorithm.num_rollout_samples // generators)
    fit = cache * devices // ((prompt_length + response) * policy.kv_bytes_per_token)
    rounds = -(-samples // max(1, min(config.generation.max_num_seqs, fit)))
    rows = -(-samples // rounds)
    reading = policy.forward_flops(prompt_length)
    decoding = (policy.forward_flops(prompt_length + response) - reading) / response
    kv_cache = rows * policy.kv_bytes_per_token * (prompt_length + response / 2)
    read = (policy.base_weights + kv_cache) / (devices * BANDWIDTH_SHARE * config.device_gb_per_s * 1e9)
    step = max(read, rows * decoding / _flops(config, devices))
    prompts = rows * reading / _flops(config, devices)
    return Part(
        rounds * (prompts + response * step),
        f"{rounds} x {rows} sequences on each of {generators} generators: {prompts:.2g} s for prompts of {prompt_length} "
        f"tokens, then {response} decoding steps of {1e3 * step:.2g} ms, which read {policy.base_weights / 1e9:.3g} GB of "
        f"weights and {kv_cache / 1e9:.3g} GB of KV cache and compute {rows * decoding / 1e12:.2g} TFLOP",
    )


def training(
    config: PlanConfig, policy: Blueprint, critic: Blueprint | None, *, prompt_length: int,
    reference: Blueprint | None = None,
) -> Part:  # fmt: skip
    """Log-probabilities and update. The critic's update runs alongside the actor's, or in turn if they share the device.
    Excludes communication, offloading and padding."""
    algorithm, length = config.algorithm, prompt_length + config.generation.max_length
    forwards = (algorithm.old_logprobs == "trainer") + (config.needs_reference and reference is None)
    update = algorithm.ppo_epochs * _passes(config.model)
    one = algorithm.num_rollout_samples * policy.forward_flops(length) / _flops(config, config.ranks)
    seconds: float = update * one
    beside = ""
    if critic is not None:
        passes = algorithm.ppo_epochs * _passes(config.critic.model)
        once = algorithm.num_rollout_samples * critic.forward_flops(length) / _flops(config, config.critic_ranks)
        of_critic = passes * once
        seconds = seconds + of_critic if config.together else max(seconds, of_critic)
        beside = f"; {of_critic:.3g} s for the critic's update {'after' if config.together else 'beside'} the actor's"
    if reference is not None:
        of_reference = algorithm.num_rollout_samples * reference.forward_flops(length) / _flops(config, config.ranks)
        seconds, beside = seconds + of_reference, f"{beside}; {of_reference:.3g} s for the reference's pass"
    return Part(
        forwards * one + seconds,
        f"{forwards} + {update} passes (log-probabilities, update) of {one:.3g} s: {algorithm.num_rollout_samples} sequences of "
        f"{length} tokens, {policy.forward_flops(length) / 1e12:.3g} TFLOP each, on {config.ranks} ranks{beside}",
    )


def _flops(config: PlanConfig, devices: int) -> float:
    """FLOP/s of matrix products on ``devices``."""
    assert config.device_tflops is not None
    return devices * COMPUTE_SHARE * config.device_tflops * 1e12


def _passes(model: ModelConfig) -> int:
    """Forwards that forward and backward cost. The backward has two matrix products for each of the forward's, for inputs and
    weights; adapters leave out the second, recomputing adds a forward."""
    return (2 if model.lora.rank else 3) + model.gradient_checkpointing

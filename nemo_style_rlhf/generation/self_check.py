"""Whether samples keep their bits in any company. With engines the clock decides what is sampled beside what."""

from collections.abc import Sequence

from nemo_style_rlhf.generation.in_process import InProcessGenerator
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId

TOKENS = 8
"""Maximum number of tokens of a response."""


def keeps_bits(generator: InProcessGenerator, sequences: Sequence[Sequence[int]], version: int) -> bool:
    """Whether responses to beginnings of ``sequences`` have the same tokens and log-probabilities together and each alone."""
    prompts = [tuple(sequence[: max(1, length)]) for sequence in sequences for length in (len(sequence) // 2, 1)]
    limits = [min(TOKENS, len(sequence) - len(sequence) // 2) for sequence in sequences for _ in range(2)]
    requests = [
        GenerationRequest(SampleId(0, number, 0), prompt, seed=number, max_tokens=limit)
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    together = _sampled(generator, requests, version)
    return all(_sampled(generator, [request], version)[0] == whole for request, whole in zip(requests, together))


def _sampled(
    generator: InProcessGenerator, requests: Sequence[GenerationRequest], version: int
) -> list[tuple[list[int], list[float]]]:
    stream = generator.stream(version)
    stream.submit(requests)
    found: dict[SampleId, Completion] = {each.request.sample: each for each in stream.completed()}
    completions = [found[request.sample] for request in requests]
    return [(completion.token_ids.tolist(), completion.logprobs.tolist()) for completion in completions]

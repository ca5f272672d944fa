"""Checks that a sample does not depend on what it is batched with. With engines the clock decides that."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

from nemo_style_rlhf.generation.in_process import InProcessGenerator, InProcessStream
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId
from nemo_style_rlhf.schema.generation import SamplingOverrides

log = logging.getLogger(__name__)
TOKENS = 8
"""Maximum number of tokens of a response of the short check."""
LONG = 384
"""Tokens of the thorough check's response: kernels that split a sequence among processors do so from some length on."""
TURN = 16
"""Tokens of the responses that begin while another decodes."""
Sample = tuple[list[int], list[float]]
"""Tokens and log-probabilities."""


def loses_bits(
    generator: InProcessGenerator, sequences: Sequence[Sequence[int]], version: int, *, thorough: int = 0
) -> str:
    """Find a cause that changes the tokens or log-probabilities of responses to beginnings of ``sequences``.

    Args:
        thorough: also check causes while a sample decodes, up to this sequence length; 0 skips that.

    Returns:
        The cause, as the rest of a sentence; empty if none was found.
    """
    prompts = [tuple(sequence[: max(1, length)]) for sequence in sequences for length in (len(sequence) // 2, 1)]
    limits = [min(TOKENS, len(sequence) - len(sequence) // 2) for sequence in sequences for _ in range(2)]
    requests = [
        GenerationRequest(SampleId(0, number, 0), prompt, seed=number, max_tokens=limit)
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    together = _all(generator.stream(version), requests)
    if any(_all(generator.stream(version), [request]) != [whole] for request, whole in zip(requests, together)):
        return "what is sampled beside it"
    return _while_decoding(generator, requests[0], version, thorough) if thorough else ""


def _while_decoding(generator: InProcessGenerator, short: GenerationRequest, version: int, length: int) -> str:
    """Check one long sample under the conditions of benchmarks/sample_bits.py; returns the cause of a difference."""
    tokens = min(LONG, length - len(short.prompt) - TURN)
    if tokens < TURN:
        log.warning("sequences of at most %d tokens are too short to try out whether samples keep their bits", length)
        return ""
    request = replace(short, max_tokens=tokens, sampling=SamplingOverrides(min_length=tokens))
    (alone,) = _all(generator.stream(version), [request])
    steps = len(alone[0]) // 2
    others = [
        replace(
            request, sample=replace(request.sample, index=1 + number), max_tokens=TURN,
            prompt=tuple(islice(cycle(request.prompt), (length - TURN) // (1 + number))),
        )
        for number in range(3)
    ]  # fmt: skip
    if _begun(generator, request, version, steps, others)[0] != alone:
        return "a prompt that is read while it decodes"
    if _begun(generator, request, version, steps, [], preempted=True)[0] != alone:
        return "being preempted"
    grown = (*request.prompt, *alone[0][:steps])
    turn = replace(
        request, sample=replace(request.sample, index=1), prompt=grown, seed=request.seed + 1, max_tokens=TURN
    )
    if _begun(generator, request, version, len(alone[0]) - 1, [turn])[1:] != _all(generator.stream(version), [turn]):
        return "a prompt whose cache was filled by decoding"
    return ""


def _begun(
    generator: InProcessGenerator, request: GenerationRequest, version: int, steps: int,
    others: Sequence[GenerationRequest], *, preempted: bool = False,
) -> list[Sample]:  # fmt: skip
    """All samples, with ``others`` begun ``steps`` steps after ``request``."""
    stream = generator.stream(version)
    stream.submit([request])
    for _ in range(steps):
        generator.step()
    if preempted:
        generator.preempt()
    return _all(stream, [request, *others], begun=1)


def _all(stream: InProcessStream, requests: Sequence[GenerationRequest], *, begun: int = 0) -> list[Sample]:
    stream.submit(requests[begun:])
    found: dict[SampleId, Completion] = {each.request.sample: each for each in stream.completed()}
    completions = [found[request.sample] for request in requests]
    return [(completion.token_ids.tolist(), completion.logprobs.tolist()) for completion in completions]

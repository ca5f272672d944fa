"""The two data types that carry everything: a sample, and a batch of samples ready to learn from."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_style_rlhf.generation.interface import Completion, SampleId


@dataclass
class Rollout:
    """One sample: a prompt and what the policy made of it. L is the length of the whole sequence in tokens."""

    sample: SampleId
    seed: int
    tokens: Tensor
    """[L] int64: prompt and response."""
    response_mask: Tensor
    """[L] bool: on tokens the policy produced; off on the prompt and on text an environment inserted."""
    sampler_logprobs: Tensor
    """[L] float32, nats: of each response token when it was sampled; 0 elsewhere."""
    weights_version: Tensor
    """[L] int64: the policy that produced each response token; -1 elsewhere."""
    finish_reason: str
    """``stop`` or ``length``."""
    max_length: int
    """Tokens the response could have had: generation.max_length, or the prompt's own."""
    prompt_text: str
    temperature: float | None = None
    """The prompt's own; None for the run's."""
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def response_tokens(self) -> list[int]:
        return self.tokens[self.response_mask].tolist()

    @staticmethod
    def from_completion(
        completion: Completion, prompt_text: str, label: str | None, metadata: dict[str, Any]
    ) -> "Rollout":
        """A single-turn rollout: everything after the prompt is the policy's."""
        prompt = completion.request.prompt
        response_mask = torch.arange(len(prompt) + len(completion.token_ids)) >= len(prompt)
        logprobs = torch.zeros(len(response_mask))
        logprobs[response_mask] = completion.logprobs
        return Rollout(
            sample=completion.request.sample,
            seed=completion.request.seed,
            tokens=torch.tensor([*prompt, *completion.token_ids]),
            response_mask=response_mask,
            sampler_logprobs=logprobs,
            weights_version=torch.where(response_mask, completion.weights_version, -1),
            finish_reason=completion.finish_reason,
            max_length=completion.request.max_tokens,
            prompt_text=prompt_text,
            temperature=completion.request.sampling.temperature,
            label=label,
            metadata=metadata,
        )


@dataclass
class Experience:
    """A batch of B rollouts laid end to end, N tokens in all, aligned to actions.

    Entry t of a sequence is the state after tokens 0..t, whose action is token t+1; its last entry has no action.
    Per-token tensors are [N] float32 and mean nothing where ``mask`` is 0.
    """

    rollouts: list[Rollout]
    lengths: list[int]
    """[B] tokens per sequence."""
    temperatures: Tensor | None
    """[B] float32, where prompts have their own."""
    tokens: Tensor
    """[N] int64."""
    mask: Tensor
    """1 where the action is a token the policy produced and learns from; what was masked for being truncated is compared with."""
    sampler_logprobs: Tensor | None
    """Nats, as reported by the generator; None where they are ``logprobs``."""
    logprobs: Tensor
    """Nats, of the policy that is about to be updated (PPO's "old" policy)."""
    ref_logprobs: Tensor | None
    """Nats, of the frozen reference; None where nothing needs it."""
    scores: Tensor
    """[B] sequence rewards as their sources gave them; NaN where ``failed``."""
    failed: Tensor
    """[B] bool: no source could score it, so it is masked."""
    values: Tensor | None
    """Of the critic before its update; None without a critic."""
    kl: Tensor
    """Per-token estimate of KL(policy || reference), nats; 0 without a reference."""
    kl_coef: float
    """Of this step's KL term."""
    rewards: Tensor = field(default_factory=lambda: torch.empty(0))
    """Per token: KL penalty where it is part of the reward, and the shaped score at the last action."""
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))
    returns: Tensor | None = None
    """Advantages, before whitening, plus values: what the critic learns; None without a critic."""
    correction: Tensor | None = None
    """Importance weights trainer / sampler on the policy loss; None for none."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """[B] each: further numbers of the reward sources."""
    counts: dict[str, float] = field(default_factory=dict)
    """How the batch came about: prompts filtered out, rollouts it took, the share of groups without a difference."""

"""Sample a policy, score it with a reward model and measure its KL divergence from the reference: only with transformers, to
share as little as possible with the training that it judges."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


@dataclass
class Samples:
    """Responses of a policy to prompts, in the order of the prompts."""

    prompts: list[str]
    responses: list[str]
    """Text without special tokens, so that prompt + response is the whole text."""
    rewards: list[float]
    """The reward model's scores; empty without one."""
    kl_per_token: float
    """Mean over response tokens of log policy - log reference, in nats; 0 for the reference itself."""

    @property
    def texts(self) -> list[str]:
        """Prompt and response together."""
        return [prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)]

    @property
    def mean_reward(self) -> float:
        """Mean of the reward model's scores."""
        return sum(self.rewards) / len(self.rewards)


@torch.no_grad()
def sample(
    policy_dir: str,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    seed: int,
    reward_dir: str | None = None,
    reference_dir: str | None = None,
    temperature: float = 1.0,
    batch_size: int = 128,
) -> Samples:
    """One response per prompt; log-probabilities refer to the distribution that was sampled from."""
    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    policy = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()
    reference = (
        AutoModelForCausalLM.from_pretrained(reference_dir, dtype=torch.float32).eval() if reference_dir else None
    )
    reward_model = None
    if reward_dir:
        reward_model = AutoModelForSequenceClassification.from_pretrained(reward_dir, dtype=torch.float32).eval()
    plain_sampling = GenerationConfig(  # in place of the checkpoint's own generation settings
        do_sample=True,
        temperature=temperature,
        top_k=0,
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    result = Samples(list(prompts), [], [], 0.0)
    difference, tokens = 0.0, 0
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer(
            list(prompts[start : start + batch_size]), padding=True, padding_side="left", return_tensors="pt"
        )
        generated = policy.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            generation_config=plain_sampling,
        )
        sequences, response_lengths = _right_padded(generated, batch["attention_mask"], tokenizer)
        lengths = batch["attention_mask"].sum(1) + response_lengths
        mask = torch.arange(sequences.shape[1]) < lengths[:, None]
        for row, length, response_length in zip(sequences, lengths, response_lengths, strict=True):
            ids = row[length - response_length : length]
            result.responses.append(_text_after(tokenizer, row[: length - response_length], ids))
        if reward_model is not None:
            result.rewards += reward_model(input_ids=sequences, attention_mask=mask.long()).logits[:, 0].tolist()
        if reference is not None:
            responses = mask & (torch.arange(sequences.shape[1]) >= (lengths - response_lengths)[:, None])
            log_ratio = _logprobs(policy, sequences, mask, temperature)
            log_ratio -= _logprobs(reference, sequences, mask, temperature)
            difference += log_ratio[responses[:, 1:]].sum().item()
            tokens += int(response_lengths.sum())
    result.kl_per_token = difference / tokens if tokens else 0.0
    return result


def _right_padded(generated: Tensor, prompt_mask: Tensor, tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Rows as the trainer sees them, prompt first and padding last, each up to and including its EOS; response lengths."""
    width = prompt_mask.shape[1]
    responses = generated[:, width:]
    ended = (responses == tokenizer.eos_token_id).cumsum(1)
    lengths = ((ended - (responses == tokenizer.eos_token_id).long()) == 0).sum(1)  # tokens with no EOS before them
    rows = generated.new_full(generated.shape, tokenizer.pad_token_id)
    for index, length in enumerate(lengths.tolist()):
        row = torch.cat([generated[index, :width][prompt_mask[index].bool()], responses[index, :length]])
        rows[index, : len(row)] = row
    return rows, lengths


def _text_after(tokenizer: PreTrainedTokenizerBase, prompt_ids: Tensor, ids: Tensor) -> str:
    """The text ``ids`` add: decoded in context, because some tokenizers drop the space before a text's first word."""
    before = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    return tokenizer.decode(torch.cat([prompt_ids, ids]), skip_special_tokens=True)[len(before) :]


def _logprobs(model: PreTrainedModel, sequences: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """[B, T-1]: log-probability of token t+1 after tokens 0..t."""
    logits = model(input_ids=sequences, attention_mask=mask.long()).logits[:, :-1]
    return (logits / temperature).log_softmax(-1).gather(-1, sequences[:, 1:, None]).squeeze(-1)

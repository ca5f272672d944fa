"""A causal language model as a policy: computes log-probabilities of sampled tokens under the sampling distribution."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_style_rlhf.models.compiled import compile_forward
from nemo_style_rlhf.models.logprobs import logits_logprobs, token_logprobs
from nemo_style_rlhf.models.packing import is_packed, pack


class ActionLogprobs(NamedTuple):
    """Log-probabilities of the n actions that a mask selects, row by row. (A tuple: ZeRO-3's hooks then see its tensors.)"""

    logprobs: Tensor
    """[n] float32, nats, from logits divided by the temperature."""
    entropy: Tensor | None
    """[n] float32, in nats."""


class PolicyModel(nn.Module):
    """Wraps any ``AutoModelForCausalLM``."""

    def __init__(self, hf: PreTrainedModel, *, temperature: float = 1.0, compile_backbone: bool = False) -> None:
        """``temperature`` is the sampler's: training must use the distribution that the tokens were sampled from."""
        super().__init__()
        self.hf = hf
        self.temperature = temperature
        self._packed = is_packed(hf)
        self._plain_head = _has_plain_head(hf)
        self._compiled = compile_backbone
        if compile_backbone:
            compile_forward(hf.base_model)

    def forward(
        self,
        input_ids: Tensor,
        action_mask: Tensor,
        with_entropy: bool = False,
        temperature: float | Tensor | None = None,
    ) -> ActionLogprobs:
        """Log-probabilities of token t+1 at every entry t where ``action_mask`` [B, T] is 1.

        ``input_ids`` [B, T] int64 is padded on the right, so causal attention needs no padding mask. ``temperature`` overrides
        the sampler's, for all rows or for each row [B].
        """
        temperature = self.temperature if temperature is None else temperature
        selected = action_mask.bool()
        if isinstance(temperature, Tensor):
            temperature = temperature[:, None].expand_as(selected)[selected]
        targets = input_ids.roll(-1, dims=1)[selected]
        inputs = {"input_ids": input_ids, "use_cache": False}
        if self._packed:
            packed = pack(input_ids, selected)
            inputs, selected = packed.inputs, packed.select(selected)[None]
        if not self._plain_head:
            logits = self.hf(**inputs).logits[selected]
            logprobs, entropy = logits_logprobs(logits, targets, temperature=temperature)
            return ActionLogprobs(logprobs, entropy if with_entropy else None)
        hidden = self.hf.base_model(**inputs).last_hidden_state[selected]
        result = token_logprobs(
            hidden,
            self.hf.lm_head.weight,
            targets,
            temperature=temperature,
            with_entropy=with_entropy,
            compiled=self._compiled,
        )
        return ActionLogprobs(*result) if isinstance(result, tuple) else ActionLogprobs(result, None)


def alters_logits(hf: PreTrainedModel) -> bool:
    """True if the model's config mentions an operation on logits."""
    settings = hf.config.get_text_config().to_dict().items()
    return any("logit" in key and value not in (None, False, 1) for key, value in settings)


@torch.no_grad()
def _has_plain_head(hf: PreTrainedModel) -> bool:
    """True if logits are just ``hidden @ lm_head.weight.T``, without bias, scaling or soft-capping.

    Configs have many names for these, so the model itself is tested. A cap shows only on large logits, so a config that mentions
    logits is believed.
    """
    head = hf.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None or getattr(hf, "lm_head", None) is None:
        return False
    if alters_logits(hf):
        return False
    probe = torch.arange(4, device=hf.device)[None] % hf.config.get_text_config().vocab_size
    attention = hf.config._attn_implementation
    hf.set_attn_implementation("eager")  # the model is still on the CPU; flash attention does not support it
    hidden = hf.base_model(input_ids=probe, use_cache=False).last_hidden_state
    logits = hf(input_ids=probe, use_cache=False).logits
    hf.set_attn_implementation(attention)
    # Compute with the head itself: in bf16, a plain product may round differently (models/cpu_linear.py).
    return torch.allclose(head(hidden), logits, rtol=1e-3, atol=1e-3)

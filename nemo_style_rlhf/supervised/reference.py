"""Log-probabilities of whole responses, under the trained policy and under the initial policy."""

import copy

import torch
from torch import Tensor

from nemo_style_rlhf.data.ragged import pad
from nemo_style_rlhf.models.lora import adapters_off, has_lora
from nemo_style_rlhf.models.policy import PolicyModel


def response_logprobs(policy: PolicyModel, input_ids: Tensor, action_mask: Tensor) -> Tensor:
    """[B] float32, nats: the sum of log-probabilities over each row's actions.

    Args:
        input_ids: [B, T] int64, padded on the right.
        action_mask: [B, T] int64: 1 at entry t where token t+1 belongs to the response.
    """
    logprobs = policy(input_ids, action_mask).logprobs
    return pad(logprobs, action_mask.sum(1).tolist()).sum(1)


class FrozenReference:
    """The model before training: a copy, or the trained model with its adapters switched off.

    This is not an ``nn.Module``, so that the LightningModule that holds it neither trains nor saves it.
    """

    def __init__(self, policy: PolicyModel, *, compile_backbone: bool) -> None:
        self._trained = policy if has_lora(policy) else None
        if self._trained is None:
            frozen = copy.deepcopy(policy.hf).requires_grad_(False).eval()
            self._policy = PolicyModel(frozen, temperature=1.0, compile_backbone=compile_backbone)

    @torch.no_grad()
    def logprobs(self, input_ids: Tensor, action_mask: Tensor) -> Tensor:
        """Like :func:`response_logprobs`, without gradients or dropout."""
        if self._trained is not None:
            return self._without_adapters(self._trained, input_ids, action_mask)
        if self._policy.hf.device != input_ids.device:
            self._policy.to(input_ids.device)
        return response_logprobs(self._policy, input_ids, action_mask)

    @staticmethod
    def _without_adapters(policy: PolicyModel, input_ids: Tensor, action_mask: Tensor) -> Tensor:
        training = policy.training
        policy.eval()
        with adapters_off(policy):
            logprobs = response_logprobs(policy, input_ids, action_mask)
        policy.train(training)
        return logprobs

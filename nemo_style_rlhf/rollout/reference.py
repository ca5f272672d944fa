"""The frozen policy that KL is measured against."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.digests import tokenizer_digest
from nemo_style_rlhf.models.host_copy import HostCopy
from nemo_style_rlhf.models.loading import first_line, load_tokenizer
from nemo_style_rlhf.models.lora import adapters_off
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.rollout.logprobs import PolicyForward, batch_logprobs
from nemo_style_rlhf.schema.actor import PolicyConfig
from nemo_style_rlhf.schema.common import EngineConfig


class Reference(Protocol):
    def logprobs(
        self, tokens: Tensor, lengths: Sequence[int], mask: Tensor, temperatures: Tensor | None = None
    ) -> Tensor:
        """[N] float32, see :func:`batch_logprobs`."""


class AdaptersOff:
    """The trained policy with its adapters switched off, so that no second model is needed."""

    def __init__(
        self, policy: PolicyForward, module: nn.Module, config: EngineConfig, device: torch.device, ranks: Ranks
    ) -> None:
        """``module`` holds the adapters of ``policy``."""
        self._policy, self._module = policy, module
        self._config, self._device, self._ranks = config, device, ranks

    def logprobs(
        self, tokens: Tensor, lengths: Sequence[int], mask: Tensor, temperatures: Tensor | None = None
    ) -> Tensor:
        with adapters_off(self._module):
            return batch_logprobs(
                self._policy, tokens, lengths, mask, self._config, self._device, self._ranks, temperatures
            )


class FrozenCopy:
    """A frozen model on its own weights: the policy at the start of the run, or the model in model.reference_path."""

    def __init__(
        self, model: PolicyModel, config: EngineConfig, device: torch.device, ranks: Ranks, *, cpu_offload: bool = False,
        sharded: Callable[[nn.Module], PolicyForward] | None = None,
    ) -> None:  # fmt: skip
        """``model`` is in host memory.

        Args:
            cpu_offload: keep it on ``device`` only while it computes.
            sharded: the forward of ``model`` with its weights sharded over ``ranks``. Without it, each of them has a whole copy.
        """
        self._model: PolicyForward = model.eval().requires_grad_(False)
        self._config = config
        self._device, self._ranks = device, ranks
        self._host_copy = HostCopy(model, device) if cpu_offload else None
        if sharded is not None:
            self._model = sharded(model)
        elif not cpu_offload:
            model.to(device)

    def logprobs(
        self, tokens: Tensor, lengths: Sequence[int], mask: Tensor, temperatures: Tensor | None = None
    ) -> Tensor:
        if self._host_copy is not None:
            self._host_copy.load()
        result = batch_logprobs(
            self._model, tokens, lengths, mask, self._config, self._device, self._ranks, temperatures
        )
        if self._host_copy is not None:
            self._host_copy.rest()
        return result


def require_comparable(
    model: PolicyConfig, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel, max_length: int
) -> None:
    """Check that ``model.reference_path`` can compute what KL compares; reads only its tokenizer and its config.

    Args:
        tokenizer: the policy's.
        max_length: length of the longest sequence, in tokens.

    Raises:
        UserError: it splits text differently, or lacks ids or positions that the policy has, or is not a model.
    """
    path, remote_code = model.reference_path, model.trust_remote_code
    if not path:
        return
    given = f"model.reference_path={path}"
    if tokenizer_digest(load_tokenizer(path, trust_remote_code=remote_code)) != tokenizer_digest(tokenizer):
        raise UserError(
            f"{given} has another tokenizer than model.path={model.path}, and KL compares both token by token: give a "
            "reference with the policy's tokenizer, or null for the model before training"
        )
    try:
        text = AutoConfig.from_pretrained(path, trust_remote_code=remote_code).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(f"{given} has no config that transformers knows: {first_line(error)}") from error
    vocabulary = policy.config.get_text_config().vocab_size
    if text.vocab_size < vocabulary:
        raise UserError(
            f"{given} has a vocabulary of {text.vocab_size} ids but the policy in {model.path} may sample {vocabulary}: give a "
            "reference that knows all of them, or resize its embeddings"
        )
    positions = getattr(text, "max_position_embeddings", None)  # ALiBi models have none
    if positions is not None and positions < max_length:
        raise UserError(
            f"{given} has {positions} positions but a prompt with a response may have {max_length} tokens: lower "
            "data.max_prompt_length or generation.max_length, or give a reference with more"
        )

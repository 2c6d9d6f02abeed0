"""Algorithms of cuBLASLt beyond the one that torch takes, which is the first that its heuristic names."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fxsplit_encoder.kernels.base import capability
from fxsplit_encoder.products.cublaslt import ALIGNMENT, Plan, Product, load
from fxsplit_encoder.products.kernels.base import ProductKernel, is_half_precision
from fxsplit_encoder.products.kernels.quack import has_fused_activations
from fxsplit_encoder.products.shape import ProductShape

ALGORITHMS = 8
"""How many of the heuristic's are measured. A choice: each costs some milliseconds a layer and budget."""


class CublasLt(ProductKernel):
    """One of the heuristic's algorithms for a shape. Bias and GELU are epilogues; parts of a split sum are
    added in float32.

    Args:
        number: its place in the heuristic's order, from 1. The order is that of the library's version, by
            which measurements are kept.
    """

    plans_each_shape = True

    def __init__(self, number: int) -> None:
        self.name = f"cublaslt_{number}"
        self._number = number

    def unavailable_reason(self, device: torch.device) -> str | None:
        """It comes with torch for CUDA, where that finds its libraries by their usual names."""
        return "needs CUDA" if device.type != "cuda" else load()[1]

    def supports(self, shape: ProductShape) -> bool:
        """16-bit values, and a GELU after a bias, of the tanh form: the library has no other. Where QuACK is,
        whose tiles are faster than any of these with one (H100), it is not worth the time of comparing.
        """
        if not is_half_precision(shape) or shape.activation == "none":
            return is_half_precision(shape)
        is_beaten = has_fused_activations(capability(shape.device))
        return shape.bias and shape.activation == "gelu_tanh" and not is_beaten

    def __call__(self, rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activation: str) -> Tensor:
        """Multiplies. The workspace is a tensor, so that a capture has it in its own memory.

        Raises:
            NotImplementedError: the library knows fewer algorithms for this shape.
        """
        count, (out_features, in_features) = rows_MK.shape[0], weight_NK.shape
        result = rows_MK.new_empty(count, out_features)
        if count == 0:
            return result
        rows = _aligned(rows_MK if rows_MK.stride(0) % (ALIGNMENT // 2) == 0 else rows_MK.contiguous())
        weight, bias = _aligned(weight_NK), None if bias_N is None else _aligned(bias_N)
        sizes = count, in_features, out_features, max(rows.stride(0), in_features)
        with torch.cuda.device(rows.device):
            plan = _plan(
                Product(rows.device, rows.dtype, *sizes, bias is not None, activation == "gelu_tanh")
            )
            if len(plan.algorithms) < self._number:
                raise NotImplementedError(f"cuBLASLt knows {len(plan.algorithms)} algorithms for it")
            size = plan.algorithms[self._number - 1].workspace_bytes
            workspace = torch.empty(size, dtype=torch.uint8, device=rows.device)
            plan.run(self._number - 1, rows, weight, bias, result, workspace)
        return result


@functools.lru_cache(maxsize=4096)
def _plan(product: Product) -> Plan:
    """Shared by the kernels: one question to the heuristic for all."""
    return Plan(product, ALGORITHMS)


def _aligned(values: Tensor) -> Tensor:
    """The values at an address that every algorithm takes; almost always they are."""
    return values if values.data_ptr() % ALIGNMENT == 0 else values.clone()

"""QuACK's products for Hopper (the package `quack-kernels`)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fxsplit_encoder.kernels import CudaKernel, find
from fxsplit_encoder.products.kernels.base import ProductKernel, is_half_precision
from fxsplit_encoder.products.shape import ProductShape

_ACTIVATIONS = {"gelu_tanh": "gelu_tanh_approx"}


class Quack(CudaKernel[ProductShape], ProductKernel):
    """Bias, GELU and residual are all epilogues. It searches its tiles itself, once for each shape, and keeps
    what it found on disk.
    """

    name = "quack"
    architectures = (9,)
    module: ClassVar[str] = "quack.gemm_interface"
    attribute: ClassVar[str] = "gemm"
    fuses_residual = True
    plans_each_shape = True

    def package_problem(self, device: torch.device) -> str | None:
        """Every function that it needs has to be there."""
        problems = (find(self.module, name)[1] for name in ("gemm", "gemm_add", "gemm_act"))
        return next(filter(None, problems), None)

    def supports(self, shape: ProductShape) -> bool:
        """16-bit values; not a residual after an activation, which it would add before."""
        return is_half_precision(shape) and not (shape.residual and shape.activation != "none")

    def _multiply(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: str,
    ) -> Tensor:
        matrix = weight.t()
        result: Tensor
        if activation != "none":
            act = find(self.module, "gemm_act")[0]
            _, result = act(rows, matrix, bias=bias, activation=_ACTIVATIONS[activation], store_preact=False)
        elif residual is not None:
            result = find(self.module, "gemm_add")[0](rows, matrix, residual, bias=bias)
        else:
            result = self.function(rows, matrix, bias=bias)
        return result

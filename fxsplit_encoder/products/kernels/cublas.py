"""cuBLAS as torch calls it; on a CPU torch's own product."""

from __future__ import annotations

import torch
from torch import Tensor

from fxsplit_encoder._torch.dispatch import addmm_activation
from fxsplit_encoder.products.kernels.base import ProductKernel, activate
from fxsplit_encoder.products.shape import ProductShape


class Cublas(ProductKernel):
    """Bias and GELU are epilogues of the product where torch has one."""

    name = "cublas"

    def unavailable_reason(self, device: torch.device) -> str | None:
        """It comes with torch, for every device."""
        return None

    def supports(self, shape: ProductShape) -> bool:
        """Everything."""
        return True

    def _multiply(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: str,
    ) -> Tensor:
        matrix = weight.t()
        if bias is None:
            return activate(rows @ matrix, activation)
        if activation == "gelu_tanh" and rows.is_cuda:
            result: Tensor = addmm_activation(bias, rows, matrix, use_gelu=True)
            return result
        return activate(torch.addmm(bias, rows, matrix), activation)


class CublasAccumulating(Cublas):
    """The residual is what cuBLAS adds the product to (beta = 1), its bias added to it before."""

    name = "cublas_accumulating"
    fuses_residual = True

    def supports(self, shape: ProductShape) -> bool:
        """Layers with a residual and no activation, on a GPU: torch's own product is as good elsewhere."""
        return shape.residual and shape.activation == "none" and shape.device.type == "cuda"

    def _multiply(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: str,
    ) -> Tensor:
        assert residual is not None
        added = residual.clone() if bias is None else residual + bias
        return added.addmm_(rows, weight.t())

"""cuBLAS as torch calls it; on a CPU torch's own product."""

from __future__ import annotations

import torch
from torch import Tensor

from fxsplit_encoder._torch.dispatch import addmm_activation
from fxsplit_encoder.products.kernels.base import ProductKernel, activate
from fxsplit_encoder.products.shape import ProductShape


class Cublas(ProductKernel):
    """The bias, and a GELU of the tanh form, are epilogues of the product where torch has one."""

    name = "cublas"

    def unavailable_reason(self, device: torch.device) -> str | None:
        """It comes with torch, for every device."""
        return None

    def supports(self, shape: ProductShape) -> bool:
        """Everything."""
        return True

    def __call__(self, rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activation: str) -> Tensor:
        """The calls that Inductor makes of such a layer: where it is chosen, nothing is gained or lost."""
        matrix = weight_NK.t()
        if bias_N is None:
            return activate(rows_MK @ matrix, activation)
        if activation == "gelu_tanh" and rows_MK.is_cuda:
            result: Tensor = addmm_activation(bias_N, rows_MK, matrix, use_gelu=True)
            return result
        return activate(torch.addmm(bias_N, rows_MK, matrix), activation)

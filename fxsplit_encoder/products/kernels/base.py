"""What a kernel of a linear layer is.

Shape suffixes: M rows, K features of the input, N features of the output.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder.kernels import Kernel
from fxsplit_encoder.products.shape import ProductShape, features_after
from fxsplit_encoder.products.swiglu import swiglu_of_pairs


class ProductKernel(Kernel[ProductShape]):
    """`activation(rows @ weight.T + bias)`. Every row of the result comes from the same row of its inputs
    alone: pad rows may hold anything.
    """

    @abstractmethod
    def __call__(self, rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activation: str) -> Tensor:
        """Multiplies.

        Args:
            rows_MK: (rows, in_features), its last stride 1.
            weight_NK: (out_features, in_features), contiguous.
            bias_N: (out_features,).
            activation: one of `ACTIVATIONS`.

        Returns:
            (rows, `features_after` the activation), contiguous and new.
        """


def activate(values: Tensor, activation: str) -> Tensor:
    """Applies an activation of `ACTIVATIONS`; "gelu" is the erf form."""
    if activation == "none":
        return values
    if activation == "swiglu":
        return swiglu_of_pairs(values)
    return F.gelu(values, approximate="tanh" if activation == "gelu_tanh" else "none")


def is_half_precision(shape: ProductShape) -> bool:
    """Whether it is a product of 16-bit values on a GPU whose rows begin at multiples of 16 bytes."""
    return (
        shape.device.type == "cuda"
        and shape.dtype in (torch.bfloat16, torch.float16)
        and shape.in_features % 8 == 0
        and features_after(shape.activation, shape.out_features) % 8 == 0
    )

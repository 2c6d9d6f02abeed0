"""What decides which algorithm a product gets, beside the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NOTHING = ""
GELU_TANH = "gelu_tanh"
GELU_BELOW_ZERO = 0.1701
"""How far below zero a GELU, of either form, is at most; nor is it below half of a negative number."""

# To how many bytes libraries ask whether a pointer is aligned, at most.
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer, as a library that chooses an algorithm for it sees it."""

    device: torch.device
    dtype: torch.dtype
    in_features: int
    out_features: int
    strides: tuple[int, ...]
    """Of the matrix, (in_features, out_features)."""
    offsets: tuple[int, ...]
    """Of the matrix and the bias, if there is one: bytes past an address that is aligned to all purposes."""
    activation: str

    @classmethod
    def of(cls, rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Layer:
        """The layer of a product."""
        in_features, out_features = matrix.shape
        parameters = (matrix,) if bias is None else (matrix, bias)
        offsets = tuple(each.data_ptr() % ALIGNMENT for each in parameters)
        sizes = in_features, out_features
        return cls(rows.device, rows.dtype, *sizes, matrix.stride(), offsets, activation)

    @property
    def has_bias(self) -> bool:
        """Whether something is added to the product."""
        return len(self.offsets) == 2

    def sample(self, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows, (count, in_features), a matrix and a bias of this layer's kind: the same random numbers for
        every call.
        """
        generator = torch.Generator().manual_seed(0)

        def noise(size: int) -> Tensor:
            made = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
            return made.to(self.device, self.dtype)

        rows = noise(count * self.in_features).view(count, self.in_features)
        extents = zip((self.in_features, self.out_features), self.strides, strict=True)
        length = 1 + sum((size - 1) * stride for size, stride in extents)
        matrix = _moved(noise(length), self.offsets[0]).as_strided(
            (self.in_features, self.out_features), self.strides, self.offsets[0] // self.dtype.itemsize
        )
        bias = _moved(noise(self.out_features), self.offsets[1]) if self.has_bias else None
        if bias is not None:
            bias = bias[self.offsets[1] // self.dtype.itemsize :]
        return rows, matrix, bias

    def __str__(self) -> str:
        epilogue = ", ".join((*(("bias",) if self.has_bias else ()), *filter(None, (self.activation,))))
        of = f" ({epilogue})" if epilogue else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.in_features} to {self.out_features} in {dtype}{of}"


def activated(values: Tensor, activation: str) -> Tensor:
    """The values, or their GELU."""
    return F.gelu(values, approximate="tanh") if activation == GELU_TANH else values


def _moved(values: Tensor, offset: int) -> Tensor:
    """A vector of the same numbers, so many bytes further in memory of its own."""
    return torch.cat([values.new_zeros(offset // values.element_size()), values])

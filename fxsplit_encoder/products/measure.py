"""The calls of linear layers on which kernels are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxsplit_encoder.kernels import Example, Meter, spoil_memory
from fxsplit_encoder.products.kernels import ProductKernel
from fxsplit_encoder.products.kernels.base import activate
from fxsplit_encoder.products.shape import ProductShape


@dataclass(frozen=True, slots=True)
class ProductExample(Example[ProductKernel]):
    """The arguments of one call."""

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    activation: str

    def expected(self) -> Tensor:
        """The layer in float32. TF32, where the process allows it, is far finer than 16 bits after a sum."""
        result = self.rows.float() @ self.weight.float().t()
        if self.bias is not None:
            result += self.bias.float()
        result = activate(result, self.activation)
        return result if self.residual is None else result + self.residual.float()

    def result(self, kernel: ProductKernel) -> Tensor:
        """All rows."""
        spoil_memory(self.rows.new_empty(self.rows.shape[0], self.weight.shape[0]))
        return self._multiply(kernel)

    def timed(self, kernel: ProductKernel) -> Callable[[], object]:
        """The call as the op makes it."""
        return lambda: self._multiply(kernel)

    def _multiply(self, kernel: ProductKernel) -> Tensor:
        return kernel(self.rows, self.weight, self.bias, self.residual, self.activation)


class ProductMeter(Meter[ProductShape, ProductKernel]):
    """Compares kernels of linear layers on the device."""

    def examples(self, shape: ProductShape) -> Sequence[ProductExample]:
        """One, on random values of about the size that normalized activations and weights have."""
        # Of its own, so that measuring does not change the random numbers of the program.
        generator = torch.Generator(shape.device).manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(size, dtype=shape.dtype, device=shape.device, generator=generator)

        return [
            ProductExample(
                random(shape.rows, shape.in_features),
                random(shape.out_features, shape.in_features) * shape.in_features**-0.5,
                random(shape.out_features) if shape.bias else None,
                random(shape.rows, shape.out_features) if shape.residual else None,
                shape.activation,
            )
        ]

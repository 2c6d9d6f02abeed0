"""The calls of linear layers on which kernels are compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxsplit_encoder.kernels import MOST_CALLS_TIMED, Example, Meter, spoil_memory
from fxsplit_encoder.products.kernels import ProductKernel
from fxsplit_encoder.products.kernels.base import activate
from fxsplit_encoder.products.shape import ProductShape, features_after

# Of the L2 cache: weights that are read in turn and together are so much larger come from memory each time,
# as in a tower, where a layer's come again after all the others have been read.
_BEYOND_CACHE = 1.5


@dataclass(frozen=True, slots=True)
class ProductExample(Example[ProductKernel]):
    """The arguments of one call, and as many copies of its weight as the cache cannot hold."""

    rows: Tensor
    weights: tuple[Tensor, ...]
    bias: Tensor | None
    activation: str

    def expected(self) -> Tensor:
        """The layer in float32. TF32, where the process allows it, is far finer than 16 bits after a sum."""
        result = self.rows.float() @ self.weights[0].float().t()
        if self.bias is not None:
            result += self.bias.float()
        return activate(result, self.activation)

    def result(self, kernel: ProductKernel) -> Tensor:
        """All rows."""
        features = features_after(self.activation, self.weights[0].shape[0])
        spoil_memory(self.rows.new_empty(self.rows.shape[0], features))
        return kernel(self.rows, self.weights[0], self.bias, self.activation)

    def timed(self, kernel: ProductKernel) -> Callable[[], object]:
        """The call as the op makes it, with another copy of the weight each time. The rows are those that the
        layer before has just written, so they stay in the cache if they fit.
        """
        weights = itertools.cycle(self.weights)
        return lambda: kernel(self.rows, next(weights), self.bias, self.activation)


class ProductMeter(Meter[ProductShape, ProductKernel]):
    """Compares kernels of linear layers on the device."""

    tolerance = 1.05

    def examples(self, shape: ProductShape) -> Sequence[ProductExample]:
        """One, on random values of about the size that normalized activations and weights have."""
        # Of its own, so that measuring does not change the random numbers of the program.
        generator = torch.Generator(shape.device).manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(size, dtype=shape.dtype, device=shape.device, generator=generator)

        weight = random(shape.out_features, shape.in_features) * shape.in_features**-0.5
        copies = _copies(weight)
        return [
            ProductExample(
                random(shape.rows, shape.in_features),
                (weight, *(weight.clone() for _ in range(copies - 1))),
                random(shape.out_features) if shape.bias else None,
                shape.activation,
            )
        ]


def _copies(weight: Tensor) -> int:
    """Of how many weights the cache cannot keep one until it comes again; no more than are timed."""
    if not weight.is_cuda:
        return 1
    cache = torch.cuda.get_device_properties(weight.device).L2_cache_size
    wanted = math.ceil(_BEYOND_CACHE * cache / (weight.numel() * weight.element_size()))
    return max(2, min(MOST_CALLS_TIMED, wanted))

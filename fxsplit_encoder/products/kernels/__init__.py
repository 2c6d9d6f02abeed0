"""The kernels behind `fxsplit::linear`, one class each. Which of them runs is measured (`kernels.choice`)."""

from fxsplit_encoder.products.kernels.base import ProductKernel
from fxsplit_encoder.products.kernels.cublas import Cublas
from fxsplit_encoder.products.kernels.cublaslt import ALGORITHMS, CublasLt
from fxsplit_encoder.products.kernels.quack import TILES, Quack

__all__ = ["KERNELS", "ProductKernel"]

KERNELS: tuple[ProductKernel, ...] = (
    Cublas(),
    *(CublasLt(number) for number in range(1, ALGORITHMS + 1)),
    *(Quack(tile) for tile in TILES),
)
"""In order of preference where nothing was measured."""

"""The kernels behind `fxsplit::linear`, one class each. Which of them runs is measured (`kernels.choice`)."""

from fxsplit_encoder.products.kernels.base import ProductKernel
from fxsplit_encoder.products.kernels.cublas import Cublas, CublasAccumulating
from fxsplit_encoder.products.kernels.quack import Quack

__all__ = ["KERNELS", "ProductKernel"]

KERNELS: tuple[ProductKernel, ...] = (Cublas(), CublasAccumulating(), Quack())
"""In order of preference where nothing was measured."""

"""Which kernel computes a linear layer: `kernels.choice` for calls of `fxsplit::linear`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import ClassVar

from torch import Tensor

from fxsplit_encoder.kernels import AUTO, Chooser, KernelMeasurements, Pin, PinGrammar
from fxsplit_encoder.products.kernels import KERNELS, ProductKernel
from fxsplit_encoder.products.measure import ProductMeter
from fxsplit_encoder.products.shape import ProductShape

Measurements = KernelMeasurements[ProductShape, ProductKernel]

MEASUREMENTS: Measurements = KernelMeasurements(ProductShape, KERNELS, ProductMeter()).keep()
"""Those of this process."""

_GRAMMAR: PinGrammar[ProductShape] = PinGrammar(
    ProductShape.operation,
    tuple(kernel.name for kernel in KERNELS),
    words={
        "gelu": lambda shape: shape.activation in ("gelu", "gelu_tanh"),
        "swiglu": lambda shape: shape.activation == "swiglu",
        "plain": lambda shape: shape.activation == "none",
    },
    numbers=("rows", "in_features", "out_features"),
)


def parse_products(products: str | Mapping[str, str]) -> tuple[Pin[ProductShape], ...]:
    """The pins of the setting `products`: `kernels.PinGrammar` says how it is written.

    Raises:
        ConfigError: a kernel or a condition is unknown; every one of them is named.
    """
    return _GRAMMAR.parse(products)


class ProductChooser(Chooser[ProductShape, ProductKernel]):
    """Chooses the kernel of every linear layer: the pinned one, else the fastest that was measured.

    Args:
        products: kernels that are pinned.
        measurements: where times come from.

    Raises:
        ConfigError: an unknown kernel or condition is named.
    """

    current: ClassVar[ContextVar[ProductChooser]]

    def __init__(
        self, products: str | Mapping[str, str] = AUTO, measurements: Measurements = MEASUREMENTS
    ) -> None:
        super().__init__(parse_products(products), measurements)

    def of(self, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> ProductKernel:
        """The kernel of a call."""
        call = (rows.shape, weight.shape, rows.dtype, rows.device, bias is None, activation)
        return self.remembered(call, lambda: shape_of(rows, weight, bias, activation))


def shape_of(rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> ProductShape:
    """The shape of a call."""
    return ProductShape(
        rows.device,
        rows.dtype,
        rows=rows.shape[0],
        in_features=weight.shape[1],
        out_features=weight.shape[0],
        bias=bias is not None,
        activation=activation,
    )


_of_process = ProductChooser()
ProductChooser.current = ContextVar("fxsplit_encoder_products", default=_of_process)

current_product_chooser: Callable[[], ProductChooser] = ProductChooser.current.get
"""The chooser of the enclosing `choosing`, or the process's own, which pins nothing."""

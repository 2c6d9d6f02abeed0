"""`fxsplit::linear`: a linear layer and its activation, by the kernel that measured fastest.

`ProductChooser` chooses by `ProductMeter`'s times, for every number of rows that is captured; `compile_ahead`
begins to compile the kernels that will be compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.device import on_device
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.kernels import (
    AUTO,
    MOST_CALLS_TIMED,
    Chooser,
    Example,
    KernelMeasurements,
    Meter,
    PinGrammar,
    compile_jobs,
    poison_memory,
)
from fxsplit_encoder.kernels.products.kernels import (
    ACTIVATIONS,
    KERNELS,
    ProductKernel,
    ProductShape,
    Quack,
    activate,
    features_after,
    has_fused_activations,
)

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
        poison_memory(self.rows.new_empty(self.rows.shape[0], features))
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


Measurements = KernelMeasurements[ProductShape, ProductKernel]

MEASUREMENTS: Measurements = KernelMeasurements(ProductShape, KERNELS, ProductMeter()).keep()
"""Those of this process."""

_GRAMMAR: PinGrammar[ProductShape] = PinGrammar(
    ProductShape.operation,
    tuple(kernel.name for kernel in KERNELS),
    words={
        "gelu": lambda shape: shape.activation in ("gelu", "gelu_tanh"),
        "swiglu": lambda shape: shape.activation == "swiglu",
    },
    numbers=("rows", "in_features", "out_features"),
)


class ProductChooser(Chooser[ProductShape, ProductKernel]):
    """Chooses the kernel of every linear layer: the pinned one, else the fastest that was measured.

    Args:
        products: the setting of that name (`kernels.pins` says how it is written).
        measurements: where times come from.

    Raises:
        ConfigError: an unknown kernel or condition is named.
    """

    current: ClassVar[ContextVar[ProductChooser]]

    def __init__(
        self, products: str | Mapping[str, str] = AUTO, measurements: Measurements = MEASUREMENTS
    ) -> None:
        super().__init__(_GRAMMAR.parse(products), measurements)

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


def multiply(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activation: str) -> Tensor:
    """`activation(rows @ weight.T + bias)`, see `ProductKernel`; rows may have any strides.

    Raises:
        InputError: sizes do not fit, or there is no such activation.
    """
    _check(rows_MK, weight_NK, bias_N, activation)
    rows = rows_MK if rows_MK.stride(1) == 1 else rows_MK.contiguous()
    weight = weight_NK.contiguous()
    with on_device(rows.device):
        kernel = current_product_chooser().of(rows, weight, bias_N, activation)
        return kernel(rows, weight, bias_N, activation)


def _check(rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise InputError(
            f"fxsplit::linear: activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    if rows.dim() != 2 or weight.dim() != 2 or rows.shape[1] != weight.shape[1]:
        raise InputError(
            "fxsplit::linear: expected rows (M, K) and weight (N, K), got "
            f"{tuple(rows.shape)} and {tuple(weight.shape)}; flatten what comes before the features"
        )
    if activation == "swiglu" and weight.shape[0] % 2:
        raise InputError(
            f"fxsplit::linear: swiglu: expected an even number of rows of the weight, got {weight.shape[0]}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise InputError(f"fxsplit::linear: bias: expected ({weight.shape[0]},), got {tuple(bias.shape)}")


_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor rows, Tensor weight, Tensor? bias, str activation) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("linear", multiply, _device)


def _fake(rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    _check(rows, weight, bias, activation)
    return rows.new_empty(rows.shape[0], features_after(activation, weight.shape[0]))


torch.library.register_fake("fxsplit::linear", _fake, lib=_library)

linear = torch.ops.fxsplit.linear.default


def compile_ahead(nodes: Iterable[fx.Node], device: torch.device) -> None:
    """Begins to compile the kernels that will be compared for the layers among some nodes; none where a
    setting chooses, or where times of such layers are known and with them the kernels.
    """
    chooser = current_product_chooser()
    if device.type != "cuda" or any(pin.kernel != AUTO for pin in chooser.pins):
        return
    if not has_fused_activations(torch.cuda.get_device_capability(device)):
        return
    table = chooser.measurements.table(device)
    known = {(shape.activation, shape.dtype) for shape, found in table.items() if found.microseconds}
    for activation, dtype in _activations_of(nodes):
        if (activation, dtype) not in known:
            compile_jobs.name_quack_directory()
            names = (k.name for k in chooser.measurements.kernels if isinstance(k, Quack))
            compile_jobs.start(names, activation, dtype, device, apart=False)


def _activations_of(nodes: Iterable[fx.Node]) -> list[tuple[str, torch.dtype]]:
    """Those of layers with a bias, without which there is a variant of its own."""
    found: dict[tuple[str, torch.dtype], None] = {}
    for node in nodes:
        if node.target is linear and node.args[2] is not None:
            rows: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
            found[str(node.args[3]), rows.dtype] = None
    return list(found)

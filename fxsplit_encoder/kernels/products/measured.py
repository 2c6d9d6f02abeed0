"""`fxsplit::linear`: a linear layer and its activation, by the kernel that measured fastest.

Shape suffixes: M rows, K features of the input, N features of the output.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxsplit_encoder._torch.device import on_device
from fxsplit_encoder._torch.dispatch import addmm_activation, define_op
from fxsplit_encoder.kernels import compile_jobs
from fxsplit_encoder.kernels.choice import Chooser, KernelMeasurements, kept
from fxsplit_encoder.kernels.kernel import CallShape, CudaKernel, Kernel, find
from fxsplit_encoder.kernels.meter import MOST_CALLS_TIMED, Example, Meter
from fxsplit_encoder.kernels.store import package_version

ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu")
"""GELU in its erf or its tanh form, or silu(gate) * up of one layer with rows gate, up, gate, up."""


def features_after(activation: str, out_features: int) -> int:
    """Returns the width of a result: half of the product's for SwiGLU."""
    return out_features // 2 if activation == "swiglu" else out_features


@dataclass(frozen=True, slots=True)
class ProductShape(CallShape):
    """One call of a linear layer, a class by itself: a few rows more may begin another wave of tiles. Only
    what will be captured is measured, so there are as many as budgets.
    """

    operation: ClassVar[str] = "products"

    rows: int
    in_features: int
    out_features: int
    """Of the product, before the activation."""
    bias: bool
    activation: str

    def kind(self) -> tuple[int | str, ...]:
        """Returns the layer and its activation."""
        return self.in_features, self.out_features, self.bias, self.activation

    def extents(self) -> tuple[int, ...]:
        """Returns the rows."""
        return (self.rows,)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        bias = " + bias" if self.bias else ""
        return (
            f"{dtype} {self.in_features} to {self.out_features}{bias} + {self.activation}, rows {self.rows}"
        )


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Returns the weight or bias of both layers as one, row by row in turn: gate, up, gate, up."""
    return torch.stack((gate, up), dim=1).flatten(0, 1)


def activate(values: Tensor, activation: str) -> Tensor:
    """Applies one of `ACTIVATIONS`; SwiGLU to (rows, 2 * features) in the order of `interleaved`."""
    if activation != "swiglu":
        return F.gelu(values, approximate="tanh" if activation == "gelu_tanh" else "none")
    if values.is_cuda and values.dtype in (torch.bfloat16, torch.float16):
        from fxsplit_encoder.kernels.products.triton_kernels import swiglu

        return swiglu(values)
    return F.silu(values[..., ::2]) * values[..., 1::2]


class ProductKernel(Kernel[ProductShape]):
    """`activation(rows @ weight.T + bias)`, row by row: pad rows may hold anything."""

    @abstractmethod
    def __call__(self, rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activation: str) -> Tensor:
        """Multiplies rows with last stride 1 and a contiguous weight: (M, `features_after`), contiguous."""


class Cublas(ProductKernel):
    """cuBLAS as torch calls it, with the bias and a tanh GELU as epilogues; on a CPU torch's own product."""

    name = "cublas"

    def __call__(self, rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activation: str) -> Tensor:
        """Makes the calls that Inductor makes of such a layer."""
        matrix = weight_NK.t()
        if bias_N is None:
            return activate(rows_MK @ matrix, activation)
        if activation == "gelu_tanh" and rows_MK.is_cuda:
            result: Tensor = addmm_activation(bias_N, rows_MK, matrix, use_gelu=True)
            return result
        return activate(torch.addmm(bias_N, rows_MK, matrix), activation)


# With fewer, no tile was as fast as cuBLAS (H100 and H200, 196 and 257 rows).
_LEAST_ROWS = 258

_QUACK_NAMES = {"gelu": "gelu_erf", "gelu_tanh": "gelu_tanh_approx", "swiglu": "swiglu"}

# Of the part of the result that a block of threads computes, each number of columns a kernel to be measured.
# Other tiles were within 2 % of these or of cuBLAS (H100); larger ones leave too few registers to an
# activation. QuACK's own search runs each of 44 settings for a fifth of a second, for every number of rows.
_ROWS, _COLUMNS = 128, (160, 192)


def has_fused_activations(capability: tuple[int, int]) -> bool:
    """Whether QuACK is installed for a device of this compute capability; an import would take seconds."""
    return capability[0] in Quack.architectures and package_version("quack-kernels") is not None


class Quack(CudaKernel[ProductShape], ProductKernel):
    """QuACK's products for Hopper (`quack-kernels`), with bias and activation as epilogue of a tile."""

    architectures = (9,)
    module: ClassVar[str] = "quack.gemm_interface"
    attribute: ClassVar[str] = "gemm_act"
    plans_each_shape = True

    def __init__(self, columns: int) -> None:
        self.name = f"quack_{_ROWS}x{columns}"
        self._columns = columns

    def package_problem(self, device: torch.device) -> str | None:
        """Whether a function that it needs is missing."""
        compile_jobs.name_quack_directory()
        problems = (find(self.module, name)[1] for name in ("GemmConfig", self.attribute))
        return next(filter(None, problems), None)

    def supports(self, shape: ProductShape) -> bool:
        """16-bit values in rows that begin at multiples of 16 bytes, and enough rows to fill tiles."""
        return (
            shape.device.type == "cuda"
            and shape.dtype in (torch.bfloat16, torch.float16)
            and shape.in_features % 8 == 0
            and features_after(shape.activation, shape.out_features) % 8 == 0
            and shape.rows >= _LEAST_ROWS
        )

    @property
    def is_awaited(self) -> bool:
        """Whether its next call waits for the processes that compile ahead."""
        return compile_jobs.is_running()

    def __call__(self, rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activation: str) -> Tensor:
        """Makes the call that the autotuner of QuACK would make, with this tile."""
        compile_jobs.wait()
        result = rows_MK.new_empty(rows_MK.shape[0], features_after(activation, weight_NK.shape[0]))
        self.function(
            *(rows_MK, weight_NK.t()),
            bias=bias_N,
            activation=_QUACK_NAMES[activation],
            postact_out=result,
            store_preact=False,
            tuned=False,
            config=self._config,
        )
        return result

    @functools.cached_property
    def _config(self) -> Any:
        # One object for all calls: QuACK keeps prepared calls by its identity.
        return find(self.module, "GemmConfig")[0](
            tile_m=_ROWS,
            tile_n=self._columns,
            pingpong=True,
            cluster_m=2,
            cluster_n=1,
            device_capacity=9,
            is_dynamic_persistent=False,
        )


KERNELS: tuple[ProductKernel, ...] = (Cublas(), *map(Quack, _COLUMNS))
"""In order of preference where nothing was measured."""


# --- the calls on which they are compared

# Copies of a weight, read in turn, exceed the L2 cache by this factor to come from memory, as in a tower.
_BEYOND_CACHE = 1.5


class ProductMeter(Meter[ProductShape, ProductKernel]):
    """Compares kernels of linear layers on the device."""

    tolerance = 1.05

    def examples(self, shape: ProductShape) -> Sequence[Example]:
        """One, on random values of about the size that normalized activations and weights have."""
        # Of its own, so that measuring does not change the random numbers of the program.
        generator = torch.Generator(shape.device).manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(size, dtype=shape.dtype, device=shape.device, generator=generator)

        weight = random(shape.out_features, shape.in_features) * shape.in_features**-0.5
        rows = random(shape.rows, shape.in_features)
        bias = random(shape.out_features) if shape.bias else None
        weights = (weight, *(weight.clone() for _ in range(num_copies(weight) - 1)))
        calls = [(rows, each, bias, shape.activation) for each in weights]
        size = shape.rows, features_after(shape.activation, shape.out_features)
        return [Example(calls[0], size, _in_float32, lambda: calls)]


def _in_float32(rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    # TF32, where the process allows it, is far finer than 16 bits after a sum.
    result = rows.float() @ weight.float().t()
    if bias is not None:
        result += bias.float()
    return activate(result, activation)


def num_copies(weight: Tensor) -> int:
    """Returns so many copies that the cache keeps none until it is read again; no more than are timed."""
    if not weight.is_cuda:
        return 1
    cache = torch.cuda.get_device_properties(weight.device).L2_cache_size
    wanted = math.ceil(_BEYOND_CACHE * cache / (weight.numel() * weight.element_size()))
    return max(2, min(MOST_CALLS_TIMED, wanted))


def shape_of(rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> ProductShape:
    """Returns the shape of a call."""
    sizes = (rows.shape[0], weight.shape[1], weight.shape[0])
    return ProductShape(rows.device, rows.dtype, *sizes, bias is not None, activation)


CHOOSER = Chooser(KernelMeasurements(ProductShape, KERNELS, ProductMeter(), kept))
"""Of the process: no setting says which kernel computes a layer."""


def multiply(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activation: str) -> Tensor:
    """Computes `activation(rows @ weight.T + bias)`; `activation` is one of `ACTIVATIONS`."""
    rows = rows_MK if rows_MK.stride(1) == 1 else rows_MK.contiguous()
    weight = weight_NK.contiguous()
    with on_device(rows.device):
        call = (rows.shape, weight.shape, rows.dtype, rows.device, bias_N is None, activation)
        kernel = CHOOSER.remembered(call, lambda: shape_of(rows, weight, bias_N, activation))
        return kernel(rows, weight, bias_N, activation)


def _fake(rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    matrix = weight.t()
    product = rows.mm(matrix) if bias is None else torch.addmm(bias, rows, matrix)  # checks the sizes
    return rows.new_empty(product.shape[0], features_after(activation, product.shape[1]))


linear = define_op(
    "linear(Tensor rows, Tensor weight, Tensor? bias, str activation) -> Tensor",
    dict.fromkeys(("CPU", "CUDA"), multiply),
    _fake,
)


def compile_ahead(nodes: Iterable[fx.Node], device: torch.device) -> None:
    """Starts to compile the kernels to compare for the layers among nodes, unless they were measured."""
    if device.type != "cuda" or not has_fused_activations(torch.cuda.get_device_capability(device)):
        return
    table = CHOOSER.measurements.table(device)
    known = {(shape.activation, shape.dtype) for shape, found in table.items() if found.microseconds}
    names = [kernel.name for kernel in CHOOSER.measurements.kernels if isinstance(kernel, Quack)]
    for node in nodes:
        if node.target is linear and node.args[2] is not None:  # without a bias there is another variant
            rows: Tensor = node.all_input_nodes[0].meta["val"]
            activation = str(node.args[3])
            if (activation, rows.dtype) not in known:
                compile_jobs.name_quack_directory()
                compile_jobs.start(names, activation, rows.dtype, device)

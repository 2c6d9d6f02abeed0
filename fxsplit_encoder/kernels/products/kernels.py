"""Kernels of a linear layer with an activation, `fxsplit::linear`, and the calls that they are chosen for.

Shape suffixes: M rows, K features of the input, N features of the output.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder._torch.dispatch import addmm_activation
from fxsplit_encoder.kernels import CallShape, CudaKernel, Kernel, compile_jobs, find

Activation = Literal["gelu", "gelu_tanh", "swiglu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
"""What follows a product: GELU in its erf or its tanh form, or silu(gate) * up, whose two layers are one with
their rows in turn: gate, up, gate, up.
"""


def features_after(activation: str, out_features: int) -> int:
    """The width of a result: half of the product's for a gate and what it gates."""
    return out_features // 2 if activation == "swiglu" else out_features


@dataclass(frozen=True, slots=True)
class ProductShape(CallShape):
    """One call of a linear layer, which is a class by itself: how full the last wave of tiles is decides
    between kernels, and a few rows more begin another one.
    """

    operation: ClassVar[str] = "products"

    rows: int
    in_features: int
    out_features: int
    """Of the product, before the activation."""
    bias: bool
    activation: str

    def rounded(self) -> ProductShape:
        """The class: itself. Only what will be captured is measured, so there are as many as budgets."""
        return self

    def kind(self) -> tuple[int | str, ...]:
        """The layer and its activation."""
        return self.in_features, self.out_features, self.bias, self.activation

    def extents(self) -> tuple[int, ...]:
        """The rows."""
        return (self.rows,)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        bias = " + bias" if self.bias else ""
        return (
            f"{dtype} {self.in_features} to {self.out_features}{bias} + {self.activation}, rows {self.rows}"
        )


def interleaved(gate: Tensor, up: Tensor, *, rows: int = 0) -> Tensor:
    """The weight or bias of both layers as one: gate, up, gate, up; each with rows of zeros up to `rows`."""
    missing = max(0, rows - gate.shape[0])
    padding = [0, 0] * (gate.dim() - 1) + [0, missing]
    return torch.stack((F.pad(gate, padding), F.pad(up, padding)), dim=1).flatten(0, 1)


def swiglu_of_pairs(values: Tensor) -> Tensor:
    """silu(gate) * up of (rows, 2 * features) in the order of `interleaved`: (rows, features)."""
    if values.is_cuda and values.dtype in (torch.bfloat16, torch.float16):
        from fxsplit_encoder.kernels.products.triton_kernels import swiglu

        result: Tensor = swiglu(values)
        return result
    return F.silu(values[..., ::2]) * values[..., 1::2]


def activate(values: Tensor, activation: str) -> Tensor:
    """Applies an activation of `ACTIVATIONS`."""
    if activation == "swiglu":
        return swiglu_of_pairs(values)
    return F.gelu(values, approximate="tanh" if activation == "gelu_tanh" else "none")


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


class Cublas(ProductKernel):
    """cuBLAS as torch calls it; on a CPU torch's own product. The bias, and a GELU of the tanh form, are
    epilogues of the product where torch has one.
    """

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


# With fewer, no tile was as fast as cuBLAS (H100 and H200, 196 and 257 rows).
_LEAST_ROWS = 258

_QUACK_NAMES = {"gelu": "gelu_erf", "gelu_tanh": "gelu_tanh_approx", "swiglu": "swiglu"}

_ROWS, _COLUMNS = 128, (160, 192)
"""Of the part of the result that a block of threads computes, each number of columns a kernel to be measured.
Other tiles were within 2 % of these or of cuBLAS (H100); larger ones leave too few registers to an
activation. QuACK's own search runs each of 44 settings for a fifth of a second, for every number of rows. A
tile is compiled once for all shapes, for each activation, and kept on disk.
"""


def has_fused_activations(capability: tuple[int, int]) -> bool:
    """Whether the package is installed for a device of this compute capability. It is not imported: that
    takes seconds.
    """
    try:
        metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        return False
    return capability[0] in Quack.architectures


class Quack(CudaKernel[ProductShape], ProductKernel):
    """QuACK's products for Hopper (the package `quack-kernels`). The bias and the activation are the
    epilogue, which a group of warps computes while another multiplies; they are rounded once, together.

    Args:
        columns: of the tile.
    """

    architectures = (9,)
    module: ClassVar[str] = "quack.gemm_interface"
    attribute: ClassVar[str] = "gemm_act"
    plans_each_shape = True

    def __init__(self, columns: int) -> None:
        self.name = f"quack_{_ROWS}x{columns}"
        self._columns = columns

    def package_problem(self, device: torch.device) -> str | None:
        """Every function that it needs has to be there."""
        compile_jobs.name_quack_directory()
        problems = (find(self.module, name)[1] for name in ("GemmConfig", self.attribute))
        return next(filter(None, problems), None)

    def supports(self, shape: ProductShape) -> bool:
        """16-bit values in rows that begin at multiples of 16 bytes, and rows enough to fill tiles."""
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
        """What the autotuner of QuACK would call, with the tile of this kernel."""
        if compile_jobs.is_running():
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
        """One object for all calls: QuACK remembers what it has prepared by its identity."""
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

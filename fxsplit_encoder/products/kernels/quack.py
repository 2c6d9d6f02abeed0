"""QuACK's products for Hopper (the package `quack-kernels`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxsplit_encoder.attention.kernels import ahead
from fxsplit_encoder.kernels import CudaKernel, find
from fxsplit_encoder.products.kernels.base import ProductKernel, is_half_precision
from fxsplit_encoder.products.kernels.quack_files import name_directory
from fxsplit_encoder.products.shape import ProductShape, features_after

# With fewer, no tile was as fast as cuBLAS (H100 and H200, 196 and 257 rows).
_LEAST_ROWS = 258

_ACTIVATIONS = {"none": None, "gelu": "gelu_erf", "gelu_tanh": "gelu_tanh_approx", "swiglu": "swiglu"}

# With an activation the other tiles are slower: its registers leave fewer for sums (H100).
_WITH_ACTIVATIONS = ("128x160", "128x192", "128x208", "128x256")

# What the columns of a tile of pairs have to be a multiple of.
_PAIRED = 32


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of the result that a block of threads computes."""

    rows: int
    columns: int
    pingpong: bool
    """Whether two groups of warps compute a tile each, in turn, and not one tile together."""

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


TILES = (
    Tile(256, 128, pingpong=False),
    Tile(256, 160, pingpong=False),
    Tile(256, 192, pingpong=False),
    Tile(128, 256, pingpong=False),
    Tile(128, 160, pingpong=True),
    Tile(128, 192, pingpong=True),
    Tile(128, 208, pingpong=True),
)
"""Each a kernel to be measured. QuACK's own search runs each of 44 settings for a fifth of a second, for
every number of rows. A tile is compiled once for all shapes, for each activation, and kept on disk.
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
    """The bias and the activation are the epilogue, which a group of warps computes while another multiplies.
    They are rounded once, together.

    Args:
        tile: that of the kernel.
    """

    architectures = (9,)
    module: ClassVar[str] = "quack.gemm_interface"
    attribute: ClassVar[str] = "gemm_tuned"
    plans_each_shape = True

    def __init__(self, tile: Tile) -> None:
        self.name = f"quack_{tile}"
        self._tile = tile

    def package_problem(self, device: torch.device) -> str | None:
        """Every function that it needs has to be there."""
        name_directory()
        problems = (find(self.module, name)[1] for name in ("GemmConfig", "gemm_tuned", "gemm_act"))
        return next(filter(None, problems), None)

    def supports(self, shape: ProductShape) -> bool:
        """16-bit values, rows enough to fill tiles."""
        return is_half_precision(shape) and shape.rows >= _LEAST_ROWS and self.applies(shape.activation)

    @property
    def is_awaited(self) -> bool:
        """Whether its next call waits for the processes that compile ahead."""
        return ahead.is_running()

    def applies(self, activation: str) -> bool:
        """Whether it is a candidate for products with this activation."""
        if activation == "swiglu" and self._tile.columns % _PAIRED:
            return False
        return activation == "none" or str(self._tile) in _WITH_ACTIVATIONS

    def __call__(self, rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activation: str) -> Tensor:
        """What the autotuner of QuACK would call, with the tile of this kernel."""
        if ahead.is_running():
            ahead.wait()
        matrix, features = weight_NK.t(), features_after(activation, weight_NK.shape[0])
        result = rows_MK.new_empty(rows_MK.shape[0], features)
        if (function := _ACTIVATIONS[activation]) is None:
            self.function.fn(rows_MK, matrix, result, bias=bias_N, config=self._config)
        else:
            find(self.module, "gemm_act")[0](
                *(rows_MK, matrix),
                bias=bias_N,
                activation=function,
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
            tile_m=self._tile.rows,
            tile_n=self._tile.columns,
            pingpong=self._tile.pingpong,
            cluster_m=2,
            cluster_n=1,
            device_capacity=9,
            is_dynamic_persistent=False,
        )

"""QuACK's products for Hopper (the package `quack-kernels`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxsplit_encoder.kernels import CudaKernel, find
from fxsplit_encoder.products.kernels.base import ProductKernel, is_half_precision
from fxsplit_encoder.products.shape import ProductShape

# Of fewer rows the larger part of every tile would be empty.
_LEAST_ROWS = 64


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
    Tile(128, 192, pingpong=True),
    Tile(128, 208, pingpong=True),
)
"""Some of the 11 that QuACK searches, each a kernel to be measured. Its own search runs each of 44 settings
for a fifth of a second, for every number of rows. A tile is compiled once for all shapes and kept on disk.
"""


class Quack(CudaKernel[ProductShape], ProductKernel):
    """The bias is an epilogue. GELU is one in the package too, but of 0.6.5 it cannot be made beside
    nvidia-cutlass-dsl 4.8.1: a `ContextVar` in it has no key for the package's cache.

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
        problems = (find(self.module, name)[1] for name in ("GemmConfig", "gemm_tuned"))
        return next(filter(None, problems), None)

    def supports(self, shape: ProductShape) -> bool:
        """16-bit values, nothing applied to the result."""
        return is_half_precision(shape) and shape.rows >= _LEAST_ROWS and shape.activation == "none"

    def __call__(self, rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activation: str) -> Tensor:
        """What the autotuner of QuACK would call, with the tile of this kernel."""
        matrix, result = weight_NK.t(), rows_MK.new_empty(rows_MK.shape[0], weight_NK.shape[0])
        self.function.fn(rows_MK, matrix, result, bias=bias_N, config=self._config)
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

"""`fxsplit::tiles`: tells the backend, inside of a graph, what a budget of a dense tower counts.

Without it a budget would count tiles (rows of the batch) there, and output tokens in the manager.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.compile import HostOp, register_host_op
from fxsplit_encoder.protocol import BudgetDeclaration

_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "tiles(Tensor pixel_values, int tokens_per_tile, int max_tiles, bool declared=False) -> Tensor[]"
)


def _copy(pixel_values: Tensor, tokens_per_tile: int, max_tiles: int, declared: bool = False) -> list[Tensor]:
    """Under other backends: an op may not return its own input."""
    return [pixel_values.clone()]


_library.impl("tiles", _copy, "CompositeExplicitAutograd")


def _fake(pixel_values: Tensor, tokens_per_tile: int, max_tiles: int, declared: bool = False) -> list[Tensor]:
    return [torch.empty_like(pixel_values)]


torch.library.register_fake("fxsplit::tiles", _fake, lib=_library)

tiles = torch.ops.fxsplit.tiles.default

register_host_op(
    tiles,
    HostOp(
        run=lambda pixel_values, tokens_per_tile, max_tiles, declared=False: [pixel_values],
        declares_padding=lambda pixel_values, tokens_per_tile, max_tiles, declared=False: declared,
        budgets=BudgetDeclaration(
            rows_per_output_token=lambda pixel_values, tokens_per_tile, max_tiles, declared=False: Fraction(
                1, tokens_per_tile
            ),
            budget_range=lambda pixel_values, tokens_per_tile, max_tiles, declared=False: (
                tokens_per_tile,
                tokens_per_tile * max_tiles,
            ),
        ),
    ),
)

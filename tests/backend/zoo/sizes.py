"""The number of tokens in the values, in the sizes and in the branches."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .entries import of

# Numbers of tokens beyond constants, of the default ladder; dense, since packed attention would take long.
_LARGE = {"counts": (9999, 5001, 5, 12, 4097, 16384, 12000), "layout": "dense", "warmup": "none"}


def _table_interpolated(x: Tensor) -> Tensor:
    table = torch.linspace(-1, 1, 32, dtype=torch.float32).view(1, 8, 4)
    return x + F.interpolate(table, x.shape[0], mode="linear")[0].t().to(x.dtype)


def _table_by_share(x: Tensor) -> Tensor:
    table = torch.linspace(-1, 1, 128, dtype=x.dtype).view(16, 8)
    return x + table[torch.arange(x.shape[0]) * 16 // x.shape[0]]


def _table_from_the_end(x: Tensor) -> Tensor:
    table = torch.linspace(-1, 1, 1600, dtype=x.dtype).view(200, 8)
    return x + table[-x.shape[0] :]


def _branch_large(x: Tensor) -> Tensor:
    return x - x.mean(0) if x.shape[0] > 32 else x * 2


def _branch_of_fours(x: Tensor) -> Tensor:
    if x.shape[0] % 4 == 0:
        return x.view(-1, 4, 8).flip(1).reshape(-1, 8)
    return x


def _halvings(x: Tensor) -> Tensor:
    n, halvings = x.shape[0], 0
    while n > 20:
        n, halvings = n // 2, halvings + 1
    return x * (1 + halvings)


def _rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], dtype=x.dtype)[:, None]


SIZES = {
    "times the count": lambda x: x * x.shape[0],
    "times a root of the count": of(lambda x: x * x.shape[0] ** 0.1, runs=2),
    "plus 64ths of the count": of(lambda x: x * (1 + x.shape[0] // 64), runs=2),
    "least of the count and 40": lambda x: x * min(x.shape[0], 40),
    "count as a tensor": lambda x: x * torch.full((), x.shape[0], dtype=x.dtype),
    "count as a result": lambda x: (x * 2, x.shape[0], x.shape[0] // 4),
    "positions by the count": of(lambda x: x + _rows(x) / x.shape[0], least=1),
    "arange from the count": lambda x: x + torch.arange(x.shape[0], 2 * x.shape[0], dtype=x.dtype)[:, None],
    "last position": of(lambda x: x + _rows(x)[-1], least=1),
    "linspace to the count": lambda x: x + torch.linspace(0, x.shape[0], x.shape[0], dtype=x.dtype)[:, None],
    "table interpolated": of(_table_interpolated, least=1, tolerance=4),
    "table by share": of(_table_by_share, least=1),
    "table from the end": of(_table_from_the_end, least=1),
    "first half marked": lambda x: torch.where(_rows(x) < x.shape[0] // 2, x, -x),
    "length of an arange": lambda x: x + torch.arange(x.shape[0]).amax().to(x.dtype) if x.shape[0] else x,
    "ones of half": lambda x: x + torch.ones(x.shape[0] // 2, 1, dtype=x.dtype).sum(),
    "ones of at most 20": lambda x: x + torch.ones(min(x.shape[0], 20), 1, dtype=x.dtype).sum(),
    "zeros of a quarter": lambda x: (x, x.new_zeros(x.shape[0] // 4, 2)),
    "features by the count": lambda x: x[:, : 1 + x.shape[0] % 8],
    "expanded to the count": lambda x: x + x.new_ones(1, 1).expand(x.shape[0], 1).sum(0),
    "branch on large counts": _branch_large,
    "branch on multiples of 4": _branch_of_fours,
    "halvings in a loop": _halvings,
    "ones of 5000ths": of(
        lambda x: x + x.new_ones(1, 1).expand(x.shape[0] // 5000 + 1, 1).sum(), runs=2, **_LARGE
    ),
    "ones beyond 4096": of(lambda x: x + x.new_ones(max(x.shape[0], 4096) - 4095, 1).sum(), **_LARGE),
    "features by 5000ths": of(lambda x: x[:, : 1 + x.shape[0] // 5000], **_LARGE),
    "branch on 8000": of(lambda x: x - x.mean(0) if x.shape[0] > 8000 else x, **_LARGE),
}

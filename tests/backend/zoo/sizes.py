"""The number of tokens in the values, in the sizes and in the branches."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .entries import of

# Numbers of tokens beyond constants, of the default ladder; dense, since packed attention would take long.
_LARGE = {"counts": (9999, 5001, 5, 12, 4097, 16384, 12000), "layout": "dense", "warmup": "none"}


def _sinusoids(x: Tensor) -> Tensor:
    """Positions in shares of the number of tokens."""
    shares = torch.arange(x.shape[0], dtype=x.dtype) / x.shape[0]
    return x + (shares[:, None] * torch.arange(1, 9, dtype=x.dtype)).sin()


def _table_interpolated(x: Tensor) -> Tensor:
    table = torch.linspace(-1, 1, 32, dtype=torch.float32).view(1, 8, 4)
    return x + F.interpolate(table, x.shape[0], mode="linear")[0].t().to(x.dtype)


def _table_by_share(x: Tensor) -> Tensor:
    table = torch.linspace(-1, 1, 128, dtype=x.dtype).view(16, 8)
    return x + table[torch.arange(x.shape[0]) * 16 // x.shape[0]]


def _table_from_the_end(x: Tensor) -> Tensor:
    table = torch.linspace(-1, 1, 1600, dtype=x.dtype).view(200, 8)
    return x + table[-x.shape[0] :]


def _table_by_distance_to_the_end(x: Tensor) -> Tensor:
    table = torch.linspace(-1, 1, 1600, dtype=x.dtype).view(200, 8)
    return x + table[x.shape[0] - 1 - torch.arange(x.shape[0])]


def _branch_odd(x: Tensor) -> Tensor:
    return x if x.shape[0] % 2 else -x


def _branch_large(x: Tensor) -> Tensor:
    return x - x.mean(0) if x.shape[0] > 32 else x * 2


def _branch_small_is_whole(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 32 else x.flip(0)


def _branch_seven(x: Tensor) -> Tensor:
    return x * 0 if x.shape[0] == 7 else x + 1


def _branch_one(x: Tensor) -> Tensor:
    return x * 3 if x.shape[0] == 1 else x


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
    "by the count": of(lambda x: x / x.shape[0], least=1),
    "sum by the count": of(lambda x: x + x.sum(0) / x.shape[0], least=1),
    "times a root of the count": of(lambda x: x * x.shape[0] ** 0.1, runs=2),
    "times the tenth root of the count, small": lambda x: x + 0.3 * x.shape[0] ** 0.1,
    "by the root of the count": of(lambda x: x * x.shape[0] ** -0.5, least=1),
    "times the logarithm of the count": of(lambda x: x * math.log(x.shape[0] + 1)),
    "times the cosine of the count": lambda x: x * math.cos(x.shape[0]),
    "plus 64ths of the count": of(lambda x: x * (1 + x.shape[0] // 64), runs=2),
    "plus 16ths of the count": lambda x: x * (1 + x.shape[0] // 16),
    "quarters, rounded up": lambda x: x * -(-x.shape[0] // 4),
    "rest of the count by 3": lambda x: x + x.shape[0] % 3,
    "least of the count and 40": lambda x: x * min(x.shape[0], 40),
    "most of the count and 30": lambda x: x * max(x.shape[0], 30),
    "count as a tensor": lambda x: x * torch.full((), x.shape[0], dtype=x.dtype),
    "count as a tensor of one": lambda x: x + torch.full((1, 8), float(x.shape[0]), dtype=x.dtype),
    "count as scalar_tensor": lambda x: x + torch.scalar_tensor(x.shape[0], dtype=x.dtype),
    "count as new_tensor": lambda x: x + x.new_tensor([x.shape[0]]),
    "entries as a number": lambda x: x / (x.numel() + 1),
    "count as a result": lambda x: (x * 2, x.shape[0], x.shape[0] // 4),
    "whether the count is large": lambda x: x * (x.shape[0] > 40),
    "pow of the count": lambda x: x + torch.pow(torch.tensor(0.9), x.shape[0]).to(x.dtype),
    "positions by the count": of(lambda x: x + _rows(x) / x.shape[0], least=1),
    "positions less the count": lambda x: x + _rows(x) - x.shape[0],
    "positions modulo the count": lambda x: x + (_rows(x) * 3) % x.shape[0],
    "positions from the middle": lambda x: x + (_rows(x) - x.shape[0] // 2),
    "positions backwards": lambda x: x + _rows(x).flip(0),
    "arange backwards": lambda x: x + torch.arange(x.shape[0] - 1, -1, -1, dtype=x.dtype)[:, None],
    "arange from the count": lambda x: x + torch.arange(x.shape[0], 2 * x.shape[0], dtype=x.dtype)[:, None],
    "arange by halves of the count": lambda x: (
        x + torch.arange(0, x.shape[0], dtype=x.dtype)[:, None] * (x.shape[0] // 2)
    ),
    "mean of positions": lambda x: x + _rows(x).mean(),
    "last position": of(lambda x: x + _rows(x)[-1], least=1),
    "linspace": lambda x: x + torch.linspace(0, 1, x.shape[0], dtype=x.dtype)[:, None],
    "linspace to the count": lambda x: x + torch.linspace(0, x.shape[0], x.shape[0], dtype=x.dtype)[:, None],
    "linspace of 8 to the count": lambda x: x + torch.linspace(0, x.shape[0], 8, dtype=x.dtype),
    "logspace": lambda x: x + torch.logspace(0, 1, x.shape[0], dtype=torch.float32)[:, None].to(x.dtype),
    "full of the count": lambda x: x + torch.full((x.shape[0], 1), x.shape[0] / 2, dtype=x.dtype),
    "Hann window": of(lambda x: x * torch.hann_window(x.shape[0], dtype=torch.float32)[:, None].to(x.dtype)),
    "sinusoids": of(_sinusoids, least=1),
    "table interpolated": of(_table_interpolated, least=1),
    "table by share": of(_table_by_share, least=1),
    "table from the end": of(_table_from_the_end, least=1),
    "table by distance to the end": _table_by_distance_to_the_end,
    "table modulo the count": of(
        lambda x: x + torch.eye(64, 8, dtype=x.dtype)[torch.arange(x.shape[0]) * 7 % x.shape[0] % 64], least=1
    ),
    "first half marked": lambda x: torch.where(_rows(x) < x.shape[0] // 2, x, -x),
    "last token marked": lambda x: x * (_rows(x) == x.shape[0] - 1),
    "mask of all but one": lambda x: x.masked_fill(_rows(x) >= x.shape[0] - 1, 0),
    "length of ones": lambda x: x * torch.ones(x.shape[0], dtype=x.dtype).sum(),
    "length of ones by mm": lambda x: (
        x + torch.ones(1, x.shape[0], dtype=x.dtype).mm(torch.ones(x.shape[0], 1, dtype=x.dtype))
    ),
    "length of an arange": lambda x: x + torch.arange(x.shape[0]).amax().to(x.dtype) if x.shape[0] else x,
    "ones of half": lambda x: x + torch.ones(x.shape[0] // 2, 1, dtype=x.dtype).sum(),
    "ones of a quarter, rounded up": lambda x: x + torch.ones(-(-x.shape[0] // 4), 1, dtype=x.dtype).sum(),
    "ones of the rest by 4": lambda x: x + torch.ones(x.shape[0] % 4 + 1, 1, dtype=x.dtype).sum(),
    "ones of at most 20": lambda x: x + torch.ones(min(x.shape[0], 20), 1, dtype=x.dtype).sum(),
    "ones of the square": lambda x: x + torch.ones(x.shape[0], x.shape[0], dtype=x.dtype).mean(0).sum(),
    "zeros of a quarter": lambda x: (x, x.new_zeros(x.shape[0] // 4, 2)),
    "ones of 64ths": lambda x: x + torch.ones(x.shape[0] // 64 + 1, 1, dtype=x.dtype).sum(),
    "features by the count": lambda x: x[:, : 1 + x.shape[0] % 8],
    "expanded to the count": lambda x: x + x.new_ones(1, 1).expand(x.shape[0], 1).sum(0),
    "branch on odd counts": _branch_odd,
    "branch on large counts": _branch_large,
    "branch on small counts": _branch_small_is_whole,
    "branch on seven": of(_branch_seven),
    "branch on one": of(_branch_one),
    "branch on multiples of 4": _branch_of_fours,
    "halvings in a loop": _halvings,
    "ones of 5000ths": of(
        lambda x: x + x.new_ones(1, 1).expand(x.shape[0] // 5000 + 1, 1).sum(), runs=2, **_LARGE
    ),
    "ones of 3000ths": of(lambda x: x + torch.ones(x.shape[0] // 3000 + 1, 1, dtype=x.dtype).sum(), **_LARGE),
    "ones beyond 4096": of(lambda x: x + x.new_ones(max(x.shape[0], 4096) - 4095, 1).sum(), **_LARGE),
    "times 5000ths": of(lambda x: x * (1 + x.shape[0] // 5000), **_LARGE),
    "features by 5000ths": of(lambda x: x[:, : 1 + x.shape[0] // 5000], **_LARGE),
    "branch on 8000": of(lambda x: x - x.mean(0) if x.shape[0] > 8000 else x, **_LARGE),
    "mean of many": of(lambda x: x - x.mean(0), **_LARGE),
    "positions of many in bfloat16": of(lambda x: x + _rows(x) / x.shape[0], **_LARGE),
}

"""What enters a graph, for a token count: the exact value, and the padded one, followed by garbage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_IDS = 7
"""Integers among the inputs lie in 1 .. NUM_IDS - 1: the zeros of pad rows are a value of their own."""

NUM_LENGTHS = (3, 5)
"""How many cumulative lengths there are, in the exact run and in the padded one."""

GARBAGE = ("nan", "inf", "huge", "normal", "mixed")
_SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e300, -1e300, 0.0, 1.0, -3.7])


Make = Callable[[int, torch.Generator], Tensor]


@dataclass(frozen=True)
class Source:
    """Where the value of an input comes from.

    Args:
        exact: makes the value for a token count.
        tail: makes what follows an exact value in one that is padded to a token count, of a kind of garbage;
            None: the value is the same whatever the token count is.
        dim: along which it follows.
    """

    exact: Callable[[int], Tensor]
    tail: Callable[[Tensor, int, str], Tensor] | None = None
    dim: int = 0

    def padded(self, count: int, padded_count: int, garbage: str) -> Tensor:
        """The value that begins with that for `count` and is as long as that for `padded_count`."""
        exact = self.exact(count)
        if self.tail is None:
            return exact
        return torch.cat((exact, self.tail(exact, padded_count, garbage)), self.dim)


MakeSource = Callable[[int], Source]
"""Given the largest token count that will be asked for."""


def garbage_like(tensor: Tensor, shape: list[int], kind: str, generator: torch.Generator) -> Tensor:
    """What may stand in pad rows: anything for floats and masks, zeros for integers."""
    if tensor.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.zeros(shape, dtype=tensor.dtype)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    values = {
        "nan": lambda: torch.full_like(normal, float("nan")),
        "inf": lambda: torch.where(normal > 0, float("inf"), -float("inf")),
        "huge": lambda: normal.sign() * 1e300,
        "normal": lambda: normal * 7 + 1,
        "mixed": lambda: _SPECIAL.double()[torch.randint(len(_SPECIAL), shape, generator=generator)],
    }[kind]()
    return values.to(tensor.dtype)


def rows(dim: int, extent: Callable[[int], int], make: Make, seed: int) -> MakeSource:
    """As many entries along `dim` as `extent` says for the token count, followed by garbage.

    Args:
        make: makes that many entries.
    """

    def source(largest: int) -> Source:
        everything = make(extent(largest), seeded(seed))

        def tail(exact: Tensor, padded_count: int, garbage: str) -> Tensor:
            shape = list(exact.shape)
            shape[dim] = extent(padded_count) - shape[dim]
            return garbage_like(exact, shape, garbage, seeded(seed + padded_count))

        return Source(lambda count: everything.narrow(dim, 0, extent(count)).clone(), tail, dim)

    return source


def permutation(seed: int) -> Source:
    """A permutation of the tokens, followed by zeros."""
    return Source(
        lambda count: torch.randperm(count, generator=seeded(seed + count)),
        lambda exact, padded_count, garbage: exact.new_zeros(padded_count - len(exact)),
    )


def segments() -> Source:
    """Cumulative lengths of two segments; followed by empty ones."""
    return Source(
        lambda count: torch.tensor([0, count // 3, count], dtype=torch.int32),
        lambda exact, padded_count, garbage: exact[-1:].expand(NUM_LENGTHS[1] - NUM_LENGTHS[0]),
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values of an input or a weight: floats whose last dimension has columns of different scales."""
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(1, NUM_IDS, shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if shape and shape[-1] <= 8:
        values *= torch.tensor([1.0, 1.0, 1e-3, 1e3, 1.0, 10.0, 1.0, 0.1][: shape[-1]], dtype=torch.float64)
    return values.to(dtype)


def draw_rows(shape: list[int], dim: int, dtype: torch.dtype) -> Make:
    """Makes entries along `dim` of a tensor whose other sizes are those of `shape`."""

    def make(size: int, generator: torch.Generator) -> Tensor:
        others = [s for d, s in enumerate(shape) if d != dim]
        return draw([size, *others], dtype, generator).movedim(0, dim).contiguous()

    return make

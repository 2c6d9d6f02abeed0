"""What enters a graph, for a token count: the exact value, and the padded one, followed by garbage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

NUM_IDS = 7
"""Integers among the inputs lie in 1 .. NUM_IDS - 1: the zeros of pad rows are a value of their own."""

NUM_LENGTHS = (3, 5)
"""How many cumulative lengths there are, in the exact run and in the padded one."""

GARBAGE = ("nan", "inf", "huge", "normal", "mixed")
_SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e300, -1e300, 0.0, 1.0, -3.7])


Make = Callable[[int, torch.Generator], Tensor]


class Source(Protocol):
    """Where the value of an input comes from."""

    def reserve(self, largest: int) -> None:
        """Says the largest token count that will be asked for."""

    def exact(self, count: int) -> Tensor:
        """The value for a token count."""

    def padded(self, count: int, padded_count: int, garbage: str) -> Tensor:
        """The value that begins with that for `count` and is as long as that for `padded_count`."""


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


class SharedSource(Source):
    """The same whatever the token count is."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def exact(self, count: int) -> Tensor:
        return self.value

    def padded(self, count: int, padded_count: int, garbage: str) -> Tensor:
        return self.value


class RowsSource(Source):
    """One of as many entries along `dim` as `extent` says for the token count.

    Args:
        make: makes that many entries.
    """

    def __init__(self, dim: int, extent: Callable[[int], int], make: Make, seed: int) -> None:
        self.dim, self.extent, self.make, self.seed = dim, extent, make, seed
        self._all: Tensor | None = None

    def reserve(self, largest: int) -> None:
        self._all = self.make(self.extent(largest), torch.Generator().manual_seed(self.seed))

    def exact(self, count: int) -> Tensor:
        assert self._all is not None
        return self._all.narrow(self.dim, 0, self.extent(count)).clone()

    def padded(self, count: int, padded_count: int, garbage: str) -> Tensor:
        exact = self.exact(count)
        shape = list(exact.shape)
        shape[self.dim] = self.extent(padded_count) - shape[self.dim]
        generator = torch.Generator().manual_seed(self.seed + padded_count)
        return torch.cat((exact, garbage_like(exact, shape, garbage, generator)), self.dim)


class PermutationSource(Source):
    """A permutation of the tokens, followed by zeros."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def exact(self, count: int) -> Tensor:
        return torch.randperm(count, generator=torch.Generator().manual_seed(self.seed + count))

    def padded(self, count: int, padded_count: int, garbage: str) -> Tensor:
        return torch.cat((self.exact(count), torch.zeros(padded_count - count, dtype=torch.int64)))


class SegmentsSource(Source):
    """Cumulative lengths of two segments; followed by empty ones."""

    def exact(self, count: int) -> Tensor:
        return torch.tensor([0, count // 3, count], dtype=torch.int32)

    def padded(self, count: int, padded_count: int, garbage: str) -> Tensor:
        return torch.tensor([0, count // 3, count, count, count], dtype=torch.int32)


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

"""The inputs that entries name, made of a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

WIDTH = 8


class Input(NamedTuple):
    """How an input is made, and which of its dimensions follow the number of tokens."""

    make: Callable[[int, torch.dtype, Generator], Tensor]
    dims: tuple[int, ...] = (0,)
    has_values: bool = True
    """Whether a warm-up may replace what it holds."""


def normal(*shape: int) -> Callable[[int, torch.dtype, Generator], Tensor]:
    """Normal numbers; -1 stands for the number of tokens."""

    def make(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
        return torch.randn([n if s == -1 else s for s in shape], generator=generator).to(dtype)

    return make


def _normal_rows(rows: Callable[[int], int]) -> Callable[[int, torch.dtype, Generator], Tensor]:
    return lambda n, dtype, g: torch.randn(rows(n), WIDTH, generator=g).to(dtype)


def integers(low: int, high: int) -> Callable[[int, torch.dtype, Generator], Tensor]:
    """One integer a token."""
    return lambda n, dtype, g: torch.randint(low, high, (n,), generator=g)


def _ids(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Integers below 4, among which there is no 0 in half of the cases."""
    low = int(torch.randint(0, 2, (), generator=generator))
    return torch.randint(low, 4, (n,), generator=generator)


def _segments(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Cumulative lengths of one to four segments, some of which may be empty."""
    count = int(torch.randint(0, 4, (), generator=generator))
    cuts = torch.randint(0, n + 1, (count,), generator=generator).sort().values.tolist()
    return torch.tensor([0, *cuts, n], dtype=torch.int32)


INPUTS: dict[str, Input] = {
    "x": Input(normal(-1, WIDTH)),
    "cu": Input(_segments, has_values=False),
    "ids": Input(_ids),
    "positions": Input(integers(3, 50)),
    "flag": Input(lambda n, dtype, g: torch.rand((), generator=g) > 0.2, ()),
    "quarter": Input(_normal_rows(lambda n: n // 4)),
    "tiles": Input(normal(-1, 5, WIDTH)),
}


def make_inputs(names: Sequence[str], n: int, dtype: torch.dtype, seed: int, kind: str) -> dict[str, Tensor]:
    """The named inputs for `n` tokens, the same for the same seed.

    Args:
        kind: "random"; or "zeros" or "ones", which all hold where that is possible.
    """
    generator = torch.Generator().manual_seed(seed)
    made = {name: INPUTS[name].make(n, dtype, generator) for name in names}
    if kind == "random":
        return made
    fill = torch.zeros_like if kind == "zeros" else torch.ones_like
    return {name: fill(value) if INPUTS[name].has_values else value for name, value in made.items()}

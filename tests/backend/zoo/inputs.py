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
    "x": Input(lambda n, dtype, g: torch.randn(n, WIDTH, generator=g).to(dtype)),
    "cu": Input(_segments, has_values=False),
    "ids": Input(_ids),
    "positions": Input(lambda n, dtype, g: torch.randint(3, 50, (n,), generator=g)),
    "flag": Input(lambda n, dtype, g: torch.rand((), generator=g) > 0.2, ()),
    "quarter": Input(lambda n, dtype, g: torch.randn(n // 4, WIDTH, generator=g).to(dtype)),
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

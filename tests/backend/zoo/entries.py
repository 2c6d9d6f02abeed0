"""What the zoo is made of: a forward on tokens, and how it may be called.

An entry is a function whose parameters name its inputs (`inputs.INPUTS`), or a module whose forward's do:

    "subtracts the mean": lambda x: x - x.mean(0),
    "pools by id": of(lambda x, ids: x.new_zeros(4, 8).index_add(0, ids, x), least=1),
    "batch norm": Entry(lambda: OnRows(nn.BatchNorm1d(8))),

It is put behind attention, before it, or between two (`placing`), so that what it does lies in the region
that the backend may pad.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Entry:
    """A forward that is made anew for every run, and what may be drawn for a run of it.

    Args:
        make: returns a module or a function of the inputs that its parameters name; `x` is (tokens, 8).
        layout: any of several words. packed: attention over all tokens, kept apart by cumulative lengths;
            dense: the tokens are a batch, and each attends within itself; sequence: they are one sequence of
            a batch of 1, and nothing counts them; own: the entry has its attention, or none.
        place: where the forward is, any of several words; only "after" counts if it does not return a tensor
            like `x`.
        warmup: with what inputs the module is warmed up, any of several words.
        least: the fewest tokens.
        runs: how often it is drawn at least, in one dtype after the other.
    """

    make: Callable[[], Callable[..., Any]]
    _: KW_ONLY
    layout: str = "packed dense"
    place: str = "before after between"
    warmup: str = "none zeros ones random"
    least: int = 0
    runs: int = 1


def of(forward: Callable[..., Any], **options: Any) -> Entry:
    """An entry that is a function; the options are those of `Entry`."""
    return Entry(lambda: forward, **options)


def input_names(forward: Callable[..., Any]) -> list[str]:
    """The inputs that a forward takes."""
    function = forward.forward if isinstance(forward, nn.Module) else forward
    return list(inspect.signature(function).parameters)


class OnRows(nn.Module):
    """A module of (tokens, 8)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result

"""Writes to inputs and buffers, results that are inputs, and results of other kinds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .entries import made, of


def _add_mean(x: Tensor) -> Tensor:
    x.add_(x.mean(0))
    return x * 2


def _zero_first(x: Tensor) -> Tensor:
    x[0] = 0
    return x + 1


def _zero_last(x: Tensor) -> Tensor:
    x[-1] = 0
    return x + 1


def _add_before(x: Tensor) -> Tensor:
    x[1:] += x[:-1].clone()
    return x


def _double(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + x.mean(0)


def _write_only(x: Tensor, keep: Tensor) -> Tensor:
    keep.copy_(keep.flip(0))
    return x * keep[:, None]


def _sort_into(x: Tensor, ids: Tensor) -> Tensor:
    ids.copy_(ids.sort().values)
    return x + ids[:, None].to(x.dtype)


def _fill_gain(x: Tensor, gain: Tensor) -> Tensor:
    gain.copy_(x.mean(0))
    return x


def _write_view(x: Tensor) -> Tensor:
    x.view(-1)[:4] = x.sum()
    return x


class _RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.5)
        return x - self.mean


class _Calls(nn.Module):
    """Counts calls and tokens; its rows stay apart."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.tokens += x.shape[0]
        return x * self.calls


class _Memory(nn.Module):
    """Adds the last token of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.last
        self.last.copy_(x[-1])
        return y


class _Cache(nn.Module):
    """Writes the tokens over the first ones of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(200, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.table[: x.shape[0]] = x
        return self.table.sum(0)


class _Replaced(nn.Module):
    """A buffer that is another tensor after every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean
        self.mean = x.mean(0)
        return y


class _Pair(NamedTuple):
    tokens: Tensor
    pooled: Tensor


def _structure(x: Tensor) -> dict[str, Any]:
    return {"tokens": x * 2, "parts": [x[:1], (x.mean(0), None)], "count": x.shape[0], "name": "zoo"}


_AFTER = {"place": "after"}

EFFECTS = {
    "mean added in place": _add_mean,
    "first token zeroed in place": of(_zero_first, least=1),
    "last token zeroed in an input": of(_zero_last, least=1, place="before"),
    "the one before added in place": of(_add_before, place="before"),
    "doubled in place": of(_double, place="before"),
    "ids sorted in place": _sort_into,
    "mean written to an input": _fill_gain,
    "written through a view of an input": of(_write_view, least=1, place="before"),
    "running mean kept": made(_RunningMean, least=1),
    "calls and tokens counted": made(_Calls),
    "memory of the last token": made(_Memory, least=1),
    "table of tokens": made(_Cache, **_AFTER),
    "buffer replaced": made(_Replaced, least=1),
    "an input as a result": of(lambda x, ids: (x - x.mean(0), ids), **_AFTER),
    "a part of an input": of(lambda x, ids: (x - x.mean(0), ids[1:]), **_AFTER),
    "an input reversed": of(lambda x, square: (x * 2, square.t()), **_AFTER),
    "a result and a view": lambda x: (y := x - x.mean(0), y[1:], y.t()),
    "results of several lengths": lambda x: (x[::2], x.sum(0), x[-1:], x.t(), x.sum()),
    "tokens beside a mean of others": lambda x, ids: (x * 2, ids + 1, ids.sum()),
    "a named tuple": lambda x: _Pair(x * 2, x.mean(0)),
    "a structure": _structure,
    "an empty result": lambda x: (x[:0], x.mean(0)),
    "a number of the values": of(lambda x: (x * 2, x.sum().item()), **_AFTER),
    "double precision": lambda x: x.double() - x.double().mean(0),
    "integers": lambda x: (x * 4).round().to(torch.int32).cumsum(0),
    "a list of tokens": of(lambda x: list(x[:4]), least=4),
    "unbound features": lambda x: (x - x.mean(0)).unbind(1),
    "scalars of all kinds": lambda x: (x.sum(), x.numel(), x.shape, x.dim(), (x > 0).sum()),
}

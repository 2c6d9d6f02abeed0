"""Writes to inputs and buffers, results that are inputs, and results of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .entries import Entry, made, of


def _add_mean(x: Tensor) -> Tensor:
    x.add_(x.mean(0))
    return x * 2


def _zero_last(x: Tensor) -> Tensor:
    x[-1] = 0
    return x + 1


def _double(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + x.mean(0)


def _sort_into(x: Tensor, ids: Tensor) -> Tensor:
    ids.copy_(ids.sort().values)
    return x + ids[:, None].to(x.dtype)


def _fill_gain(x: Tensor, gain: Tensor) -> Tensor:
    gain.copy_(x.mean(0))
    return x


def _write_view(x: Tensor) -> Tensor:
    x.view(-1)[:4] = x.sum()
    return x


class _Stateful(nn.Module):
    """A function of itself and the tokens; its buffers are zeros of some shapes."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], buffers: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.call = call
        for name, shape in buffers.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float32 if shape else torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def _stateful(
    call: Callable[[Any, Tensor], Tensor], buffers: dict[str, tuple[int, ...]], **options: Any
) -> Entry:
    return made(lambda: _Stateful(call, buffers), **options)


def _running_mean(module: Any, x: Tensor) -> Tensor:
    module.mean.lerp_(x.mean(0), 0.5)
    return x - module.mean


def _count(module: Any, x: Tensor) -> Tensor:
    """Its rows stay apart."""
    module.calls += 1
    module.tokens += x.shape[0]
    return x * module.calls


def _add_last(module: Any, x: Tensor) -> Tensor:
    y = x + module.last
    module.last.copy_(x[-1])
    return y


def _cache(module: Any, x: Tensor) -> Tensor:
    """Writes the tokens over the first ones of a table."""
    module.table[: x.shape[0]] = x
    return module.table.sum(0)


def _replace(module: Any, x: Tensor) -> Tensor:
    """The buffer is another tensor after every call."""
    y = x - module.mean
    module.mean = x.mean(0)
    return y


class _Pair(NamedTuple):
    tokens: Tensor
    pooled: Tensor


def _structure(x: Tensor) -> dict[str, Any]:
    return {"tokens": x * 2, "parts": [x[:1], (x.mean(0), None)], "count": x.shape[0], "name": "zoo"}


_AFTER = {"place": "after"}

EFFECTS = {
    "mean added in place": _add_mean,
    "last token zeroed in an input": of(_zero_last, least=1, place="before"),
    "doubled in place": of(_double, place="before"),
    "ids sorted in place": _sort_into,
    "mean written to an input": _fill_gain,
    "written through a view of an input": of(_write_view, least=1, place="before"),
    "running mean kept": _stateful(_running_mean, {"mean": (8,)}, least=1),
    "calls and tokens counted": _stateful(_count, {"calls": (), "tokens": ()}),
    "memory of the last token": _stateful(_add_last, {"last": (8,)}, least=1),
    "table of tokens": _stateful(_cache, {"table": (200, 8)}, **_AFTER),
    "buffer replaced": _stateful(_replace, {"mean": (8,)}, least=1),
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
    "a list of tokens": of(lambda x: list(x[:4]), least=4),
}

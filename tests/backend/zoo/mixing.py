"""Forwards whose tokens others, or their number, may change.

Operations alone are attacked by the fuzzer of tests/compile/padding; here are ways in which a module can go
wrong behind the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entries import Entry, OnRows, of
from .placing import attend_packed, attend_sequence

_AFTER, _OWN, _PACKED = {"place": "after"}, {"layout": "own"}, {"layout": "packed"}

# --- statistics, order, neighbours and products of all tokens


OVER_TOKENS = {
    "less the mean": lambda x: x - x.mean(0),
    "batch norm that counts": Entry(lambda: OnRows(nn.BatchNorm1d(8, momentum=None)), least=2),
    "dropout in training": Entry(lambda: OnRows(nn.Dropout(0.4))),
    "class token first": lambda x: torch.cat([x.new_ones(1, 8), x]),
    "attention over tokens as an op": attend_sequence,
}

# --- the number of tokens in the values, in the sizes and in the branches

SIZES = {
    "count as a result": lambda x: (x * 2, x.shape[0], x.shape[0] // 4),
    "branch on multiples of 4": lambda x: x.flip(0) if x.shape[0] % 4 == 0 else x,
}

# --- what the values of tokens, and of integers and truth values beside them, decide


def _broken(x: Tensor) -> Tensor:
    y = x - x.mean(0)
    torch._dynamo.graph_break()
    return y * 2


VALUES = {
    "flagged mean, warmed with the flag off": of(
        lambda x, flag: torch.where(flag, x - x.mean(0), x), warmup="zeros", runs=2
    ),
    "branch on the sum": lambda x: x - x.mean(0) if x.sum() > 0 else x + 1,
    "graph break": _broken,
    "first rows by a count": lambda x: x[: int((x[:, 0] > 0).sum())],
    "positions less their least, warmed": of(
        lambda x, positions: x + (positions - positions.min())[:, None].to(x.dtype),
        warmup="zeros ones",
        runs=2,
    ),
}

# --- cumulative lengths read by more than attention, and attention of other kinds


def _less_the_mean_of_its_segment(x: Tensor, cu: Tensor) -> Tensor:
    segment = torch.searchsorted(cu[1:].contiguous(), torch.arange(x.shape[0], dtype=cu.dtype), right=True)
    sums = x.new_zeros(cu.shape[0] - 1, 8).index_add(0, segment, x)
    return x - (sums / cu.diff().clamp(min=1)[:, None].to(x.dtype))[segment]


def _cu_changed(x: Tensor, cu: Tensor) -> Tensor:
    y = attend_packed(x, cu)
    cu.add_(1)
    return y


SEGMENTS = {
    "means of segments, given back": of(_less_the_mean_of_its_segment, **_PACKED),
    "ends changed": of(_cu_changed, **_OWN),
    "segments from lengths": of(
        lambda x, cu: attend_packed(x, F.pad(cu.diff().cumsum(0), (1, 0)).to(torch.int32)), **_OWN
    ),
}

# --- inputs of more than one length

SHAPES = {
    "quarter behind": lambda x, quarter: torch.cat([x, quarter]),
    "quarter repeated, the rest cut": of(
        lambda x, quarter: x[: quarter.shape[0] * 4] + quarter.repeat_interleave(4, 0), least=4
    ),
    "without attention, sorted": of(lambda x: x.sort(0).values, **_OWN),
}

# --- writes to inputs and buffers, results that are inputs, and results of other kinds


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
    return Entry(lambda: _Stateful(call, buffers), **options)


def _count(module: Any, x: Tensor) -> Tensor:
    """Its rows stay apart."""
    module.calls += 1
    module.tokens += x.shape[0]
    return x * module.calls


def _replace(module: Any, x: Tensor) -> Tensor:
    """The buffer is another tensor after every call."""
    y = x - module.mean
    module.mean = x.mean(0)
    return y


def _structure(x: Tensor) -> dict[str, Any]:
    return {"tokens": x * 2, "parts": [x[:1], (x.mean(0), None)], "count": x.shape[0], "name": "zoo"}


EFFECTS = {
    "written through a view of an input": of(_write_view, least=1, place="before"),
    "calls and tokens counted": _stateful(_count, {"calls": (), "tokens": ()}),
    "buffer replaced": _stateful(_replace, {"mean": (8,)}, least=1),
    "a part of an input": of(lambda x, ids: (x - x.mean(0), ids[1:]), **_AFTER),
    "a result and a view": lambda x: (y := x - x.mean(0), y[1:], y.t()),
    "results of several lengths": lambda x: (x[::2], x.sum(0), x[-1:], x.t(), x.sum()),
    "a structure": _structure,
    "a number of the values": of(lambda x: (x * 2, x.sum().item()), **_AFTER),
}

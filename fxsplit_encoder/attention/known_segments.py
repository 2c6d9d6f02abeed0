"""Attention over segments whose lengths the host knows: every run of them by the kernel that suits it.

Inside a CUDA graph the lengths are data on the device, and one kernel takes them all. Where attention runs
eagerly, at the exact shape and between the graphs of a piecewise capture, long segments may go to cuDNN one
by one, as dense batches. On one H200, 16 heads of 72 in bf16, cuDNN took 123 instead of 179 microseconds for
2304 tokens, 213 instead of 283 for 3136 and 707 instead of 1077 for 7056 (benchmarks/attention.py).
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fxsplit_encoder.attention.kernels import attend, attend_out, supports_flash

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_cudnn_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default

logger = logging.getLogger(__name__)

# Lengths at which the kernels are compared, and how much faster dense attention has to be: its result is
# copied to its place, and every call costs the host 35 microseconds.
_COMPARED_LENGTHS = (4096, 3072, 2048, 1536, 1024)
_REQUIRED_GAIN = 0.9

# cuDNN plans each shape when it is first used, which takes it 35 ms, once a thread. A shape is worth that
# when it comes again, and so many of them are kept.
_MOST_SHAPES = 512


class KnownSegments:
    """Cumulative lengths on the device, with the same numbers on the host.

    Args:
        cu_seqlens: (segments + 1,) int32, on the device of the queries.
        boundaries: the same numbers.
    """

    def __init__(self, cu_seqlens: Tensor, boundaries: Sequence[int]) -> None:
        self.cu_seqlens = cu_seqlens
        self.boundaries = boundaries
        self._lengths = [end - start for start, end in itertools.pairwise(boundaries)]
        self._runs: list[_Run] | None = None

    def attend(self, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scale: float) -> Tensor:
        """`attention.attend` over these segments."""
        runs = self._plan(query_THD)
        if len(runs) == 1 and runs[0].is_everything(query_THD):
            return runs[0].attend(query_THD, key_THD, value_THD, scale)
        out_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
        return self.attend_out(query_THD, key_THD, value_THD, scale, out_THD)

    def attend_out(
        self, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scale: float, out_THD: Tensor
    ) -> Tensor:
        """`attention.attend_out` over these segments."""
        for run in self._plan(query_THD):
            rows = slice(run.start, run.end)
            run.attend_out(query_THD[rows], key_THD[rows], value_THD[rows], scale, out_THD[rows])
        return out_THD

    def _plan(self, query: Tensor) -> list[_Run]:
        """The runs, made when the first layer attends and kept for the others of the batch."""
        if self._runs is None:
            least = None
            if supports_flash(query):
                least = dense_from(query.device, query.shape[1], query.shape[2], query.dtype)
            everything = self._packed_run(0, len(self._lengths), whole=True)
            self._runs = everything if least is None else self._mixed_runs(query, least)
        return self._runs

    def _mixed_runs(self, query: Tensor, least: int) -> list[_Run]:
        """Neighbours of one length that is worth it form a dense batch; what lies between is packed."""
        runs: list[_Run] = []
        first = packed_from = 0
        while first < len(self._lengths):
            length, last = self._lengths[first], first
            while last < len(self._lengths) and self._lengths[last] == length:
                last += 1
            shape = (*query.shape[1:], query.dtype, last - first, length)
            if length >= least and _shapes.is_worth_planning(shape):
                runs += self._packed_run(packed_from, first)
                runs.append(_Dense(self.boundaries[first], self.boundaries[last], last - first))
                packed_from = last
            first = last
        return runs + self._packed_run(packed_from, first, whole=not runs)

    def _packed_run(self, first: int, last: int, *, whole: bool = False) -> list[_Run]:
        if first == last:
            return []
        start, end = self.boundaries[first], self.boundaries[last]
        cu_seqlens = self.cu_seqlens if whole else self.cu_seqlens[first : last + 1] - start
        return [_Packed(start, end, cu_seqlens, max(self._lengths[first:last]))]


@dataclass(frozen=True, slots=True)
class _Run(ABC):
    """Segments that are neighbours and go to one kernel: rows `start` to `end`."""

    start: int
    end: int

    def is_everything(self, query: Tensor) -> bool:
        return self.start == 0 and self.end == query.shape[0]

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor: ...

    def attend_out(self, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
        out.copy_(self.attend(query, key, value, scale))


@dataclass(frozen=True, slots=True)
class _Packed(_Run):
    """One packed kernel."""

    cu_seqlens: Tensor
    longest: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return attend(query, key, value, self.cu_seqlens, self.longest, scale)

    def attend_out(self, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
        attend_out(query, key, value, self.cu_seqlens, self.longest, scale, out)


@dataclass(frozen=True, slots=True)
class _Dense(_Run):
    """`count` segments of equal length, as a dense batch."""

    count: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return _attend_dense(query, key, value, self.count, scale)


def _attend_dense(query: Tensor, key: Tensor, value: Tensor, count: int, scale: float) -> Tensor:
    length = query.shape[0] // count
    q, k, v = (x.view(count, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    out: Tensor = _cudnn_forward(q, k, v, None, False, 0.0, False, False, scale=scale)[0]
    return out.transpose(1, 2).reshape(query.shape)


class _Shapes(threading.local):
    """The dense shapes that this thread has met; cuDNN's plans belong to threads too."""

    def __init__(self) -> None:
        self._met: Counter[tuple[object, ...]] = Counter()

    def is_worth_planning(self, shape: tuple[object, ...]) -> bool:
        """Whether the shape has come before; remembers that it came now."""
        if shape not in self._met and len(self._met) >= _MOST_SHAPES:
            return False
        self._met[shape] += 1
        return self._met[shape] > 1


_shapes = _Shapes()


@functools.cache
def dense_from(device: torch.device, heads: int, head_dim: int, dtype: torch.dtype) -> int | None:
    """The segment length from which dense attention is the faster one on this device, measured at the first
    call; None: it is at no length, or cannot run.
    """
    least = None
    try:
        for length in _COMPARED_LENGTHS:
            packed, dense = _measure(device, heads, head_dim, dtype, length)
            if dense > packed * _REQUIRED_GAIN:
                break
            least = length
    except (RuntimeError, torch.OutOfMemoryError) as error:  # this build or device has no such kernel
        logger.info("dense attention was not compared at every length: %s", error)
    return least


def _measure(
    device: torch.device, heads: int, head_dim: int, dtype: torch.dtype, length: int
) -> tuple[float, float]:
    """Milliseconds of the packed and of the dense kernel for one segment, laid out as a fused projection
    leaves it.
    """
    with torch.no_grad():
        qkv = torch.randn(length, 3, heads, head_dim, device=device, dtype=dtype)
        query, key, value = qkv.unbind(1)
        cu_seqlens = torch.tensor([0, length], dtype=torch.int32, device=device)
        scale = head_dim**-0.5
        return (
            _event_ms(lambda: attend(query, key, value, cu_seqlens, length, scale)),
            _event_ms(lambda: _attend_dense(query, key, value, 1, scale)),
        )


def _event_ms(call: Callable[[], object], repeats: int = 20) -> float:
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats

"""Attention over segments whose lengths the host knows, each run of them by its own kernel.

Equal segments go to a dense kernel as a batch, if that was measured to be faster than a packed one for all.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxsplit_encoder.kernels.attention.attention_kernel import AttentionKernel, AttentionShape
from fxsplit_encoder.kernels.attention.chooser import KernelChooser, current_chooser, shape_of

Span = tuple[int, int]

# Several kernels must promise to take at most this much of the time of one: what is predicted of a batch is
# less certain than what was measured.
_REQUIRED_GAIN = 0.95

# cuDNN plans each shape when it is first used, which takes it 35 ms, once per thread. A shape is worth
# that when it recurs; this many are remembered.
_MOST_SHAPES = 512


class KnownSegments:
    """Cumulative lengths, (segments + 1,) int32 on the device, and the same `boundaries` on the host."""

    def __init__(self, cu_seqlens: Tensor, boundaries: Sequence[int]) -> None:
        self.cu_seqlens = cu_seqlens
        self.boundaries = boundaries
        self.lengths = [end - start for start, end in itertools.pairwise(boundaries)]
        self._runs: list[_Run] | None = None

    def attend(self, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scale: float) -> Tensor:
        """`attention.attend` over these segments."""
        run = self._only_run(query_THD)
        if run is not None:
            return run.kernel(query_THD, key_THD, value_THD, run.cu_seqlens, run.longest, scale)
        out_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
        return self.attend_out(query_THD, key_THD, value_THD, scale, out_THD)

    def attend_out(
        self, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scale: float, out_THD: Tensor
    ) -> Tensor:
        """`attention.attend_out` over these segments."""
        run = self._only_run(query_THD)
        if run is not None:  # every view costs the host a microsecond or two per layer
            return run.kernel(query_THD, key_THD, value_THD, run.cu_seqlens, run.longest, scale, out_THD)
        for run in self._plan(query_THD):
            rows = slice(run.start, run.end)
            values = (query_THD[rows], key_THD[rows], value_THD[rows])
            run.kernel(*values, run.cu_seqlens, run.longest, scale, out_THD[rows])
        return out_THD

    def _only_run(self, query: Tensor) -> _Run | None:
        """Returns the run that takes every row; None: there are several, or rows outside them."""
        runs = self._plan(query)
        run = runs[0] if len(runs) == 1 else None
        return run if run is not None and (run.start, run.end) == (0, query.shape[0]) else None

    def _plan(self, query: Tensor) -> list[_Run]:
        if self._runs is None:
            batch = (self.cu_seqlens, self.boundaries, self.lengths)
            self._runs = _Planner(*batch, query, current_chooser()).plan()
        return self._runs


@dataclass(frozen=True, slots=True)
class _Run:
    """Segments that are neighbors and go to one kernel: rows `start` to `end`."""

    start: int
    end: int
    kernel: AttentionKernel
    cu_seqlens: Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class _Planner:
    """Shares the segments of one batch among kernels. Spans are the first segment and one past the last."""

    cu_seqlens: Tensor
    boundaries: Sequence[int]
    lengths: Sequence[int]
    query: Tensor
    chooser: KernelChooser

    def plan(self) -> list[_Run]:
        everything = (0, len(self.lengths))
        kernels = {span: self._kernel(span, equal=True) for span in self._equal_neighbors()}
        kernels = {span: kernel for span, kernel in kernels.items() if kernel.needs_equal_segments}
        rest = self._between(list(kernels))
        if kernels and not self._gains(kernels, rest, everything):
            kernels, rest = {}, [everything]
        kernels |= {span: self._kernel(span, equal=False) for span in rest}
        return [self._run(span, kernels[span]) for span in sorted(kernels)]

    def _equal_neighbors(self) -> list[Span]:
        """Returns the longest spans of equally long segments, without the empty ones."""
        spans, first = [], 0
        for length, group in itertools.groupby(self.lengths):
            last = first + len(list(group))
            if length:
                spans.append((first, last))
            first = last
        return spans

    def _between(self, spans: list[Span]) -> list[Span]:
        edges = [0, *itertools.chain.from_iterable(spans), len(self.lengths)]
        return [
            (first, last)
            for first, last in zip(edges[::2], edges[1::2], strict=True)
            if self.boundaries[first] < self.boundaries[last]
        ]

    def _gains(self, dense: dict[Span, AttentionKernel], rest: list[Span], everything: Span) -> bool:
        """Whether dense runs are pinned, or predicted to take less than one packed kernel for all."""
        shapes = [self._shape(span, equal=True) for span in dense]
        if everything in dense or all(self.chooser.pinned(shape) is not None for shape in shapes):
            return True
        together = self._estimate(everything, equal=False)
        apart = [self._estimate(span, equal=True) for span in dense]
        apart += [self._estimate(span, equal=False) for span in rest]
        if together is None or None in apart:
            return False
        return sum(filter(None, apart)) <= _REQUIRED_GAIN * together

    def _shape(self, span: Span, *, equal: bool) -> AttentionShape:
        first, last = span
        rows = self.query[self.boundaries[first] : self.boundaries[last]]
        return shape_of(rows, max(self.lengths[first:last]), last - first, host_lengths=True, equal=equal)

    def _estimate(self, span: Span, *, equal: bool) -> float | None:
        return self.chooser.estimate(self._shape(span, equal=equal), self.lengths[slice(*span)])

    def _kernel(self, span: Span, *, equal: bool) -> AttentionKernel:
        shape = self._shape(span, equal=equal)
        ranking = self.chooser.ranking(shape)
        ready = (k for k in ranking if not k.plans_each_shape or _shapes.is_worth_planning(k, shape))
        return next(ready, ranking[0])

    def _run(self, span: Span, kernel: AttentionKernel) -> _Run:
        first, last = span
        start, end = self.boundaries[first], self.boundaries[last]
        cu_seqlens = (
            self.cu_seqlens[first : last + 1] if last - first < len(self.lengths) else self.cu_seqlens
        )
        if start and not kernel.needs_equal_segments:  # which reads their number alone
            cu_seqlens = cu_seqlens - start
        return _Run(start, end, kernel, cu_seqlens, max(self.lengths[first:last]))


class Shapes(threading.local):
    """The shapes that this thread has met; plans belong to threads too."""

    def __init__(self) -> None:
        self._met: Counter[tuple[str, AttentionShape]] = Counter()

    def is_worth_planning(self, kernel: AttentionKernel, shape: AttentionShape) -> bool:
        """Counts the shape; returns whether it has come before."""
        key = (kernel.name, shape)
        if key in self._met or len(self._met) < _MOST_SHAPES:
            self._met[key] += 1
        return self._met[key] > 1


_shapes = Shapes()

"""Attention over segments whose lengths the host knows: equal ones may be a batch for a dense kernel."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from fxsplit_encoder.kernels.attention.attention_kernel import AttentionKernel, AttentionShape
from fxsplit_encoder.kernels.attention.chooser import current_chooser, shape_of

# cuDNN plans each shape when it is first used, which takes it 35 ms, once per thread. A shape is worth
# that when it recurs; this many are remembered.
_MOST_SHAPES = 512


class KnownSegments:
    """Cumulative lengths, (segments + 1,) int32 on the device, and the same `boundaries` on the host."""

    def __init__(self, cu_seqlens: Tensor, boundaries: Sequence[int]) -> None:
        self.cu_seqlens = cu_seqlens
        self.boundaries = boundaries
        self._end = boundaries[-1]
        lengths = [end - start for start, end in itertools.pairwise(boundaries)]
        self._longest = max(lengths, default=0)
        self._are_equal = len(set(lengths)) == 1
        self._kernel: AttentionKernel | None = None

    def attend(self, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scale: float) -> Tensor:
        """`attention.attend` over these segments."""
        if 0 < self._end == query_THD.shape[0]:
            kernel = self._kernel or self._choose(query_THD)
            return kernel(query_THD, key_THD, value_THD, self.cu_seqlens, self._longest, scale)
        out_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
        return self.attend_out(query_THD, key_THD, value_THD, scale, out_THD)

    def attend_out(
        self, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scale: float, out_THD: Tensor
    ) -> Tensor:
        """`attention.attend_out` over these segments."""
        values = (query_THD, key_THD, value_THD)
        if self._end != query_THD.shape[0]:  # every view costs the host a microsecond or two per layer
            values = (query_THD[: self._end], key_THD[: self._end], value_THD[: self._end])
        if self._end:
            kernel = self._kernel or self._choose(values[0])
            kernel(*values, self.cu_seqlens, self._longest, scale, out_THD)
        return out_THD

    def _choose(self, query: Tensor) -> AttentionKernel:
        segments = self.cu_seqlens.shape[0] - 1
        shape = shape_of(query, self._longest, segments, host_lengths=True, equal=self._are_equal)
        ranking = current_chooser().ranking(shape)
        ready = (k for k in ranking if not k.plans_each_shape or _shapes.is_worth_planning(k, shape))
        self._kernel = next(ready, ranking[0])
        return self._kernel


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

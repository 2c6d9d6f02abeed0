"""The calls of attention on which kernels are compared: segments, values, and what is right."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxsplit_encoder.kernels import Example, Meter, spoil_memory
from fxsplit_encoder.kernels.attention.kernels import AttentionKernel, AttentionShape
from fxsplit_encoder.kernels.attention.kernels.builtin import PerSegment

_reference = PerSegment()


class AttentionMeter(Meter[AttentionShape, AttentionKernel]):
    """Compares attention kernels on the device."""

    def examples(self, shape: AttentionShape) -> Sequence[AttentionExample]:
        """One for every list of `example_lengths`."""
        return make_examples(shape)

    def calls(self, shape: AttentionShape) -> Sequence[tuple[object, ...]]:
        """By their segments: those that are known to be equal are also segments that are known."""
        return [(replace(shape, equal=False), *lengths) for lengths in example_lengths(shape)]


@dataclass(frozen=True, slots=True)
class AttentionExample(Example[AttentionKernel]):
    """The arguments of one call, and how many of its rows lie inside a segment (the first ones)."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    scale: float
    rows: int
    is_captured: bool

    def expected(self) -> Tensor:
        """Of every row inside a segment, one segment at a time."""
        query, key, value = (tensor.float() for tensor in (self.query, self.key, self.value))
        out = _reference(query, key, value, self.cu_seqlens, self.max_seqlen, self.scale)
        return out[: self.rows]

    def result(self, kernel: AttentionKernel) -> Tensor:
        """Of every row inside a segment."""
        spoil_memory(self.query)
        return self._attend(kernel, None)[: self.rows]

    def timed(self, kernel: AttentionKernel) -> Callable[[], object]:
        """Eager attention gets a result tensor, as between captured graphs, which a kernel may have to copy
        to.
        """
        out = None if self.is_captured else self.query.new_empty(self.query.shape)
        return lambda: self._attend(kernel, out)

    def _attend(self, kernel: AttentionKernel, out: Tensor | None) -> Tensor:
        values = (self.query, self.key, self.value)
        return kernel(*values, self.cu_seqlens, self.max_seqlen, self.scale, out)


def example_lengths(shape: AttentionShape) -> list[list[int]]:
    """Lists of segments of this shape. If the host knows them, one: the longest, and others that share the
    rest. If captured, two: as many of the longest as fit, then empty ones; and equal ones with rows left
    over.
    """
    if shape.equal:
        return [[shape.longest] * shape.segments]
    if shape.host_lengths:
        rest = min(shape.tokens - shape.longest, shape.longest * (shape.segments - 1))
        return [[shape.longest, *_share(rest, shape.segments - 1)]]
    full = max(1, min(shape.segments, shape.tokens // shape.longest))
    spread = min(shape.tokens - shape.tokens // 8, shape.longest * shape.segments)
    return [[shape.longest] * full + [0] * (shape.segments - full), _share(spread, shape.segments)]


def _share(tokens: int, segments: int) -> list[int]:
    ends = [tokens * i // segments for i in range(segments + 1)] if segments else [0]
    return [end - start for start, end in itertools.pairwise(ends)]


def pairs(lengths: list[int]) -> int:
    """Pairs of tokens that attend to each other, to which the work is proportional."""
    return sum(length**2 for length in lengths)


def make_examples(shape: AttentionShape) -> list[AttentionExample]:
    """Random values, as a fused projection lays them out, for every list of `example_lengths`."""
    made = []
    # Of its own, so that measuring does not change the random numbers of the program.
    generator = torch.Generator(shape.device).manual_seed(0)
    for lengths in example_lengths(shape):
        size = (shape.tokens, 3, shape.heads, shape.head_dim)
        qkv = torch.randn(size, dtype=shape.dtype, device=shape.device, generator=generator)
        boundaries = [0, *itertools.accumulate(lengths)]
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=shape.device)
        query, key, value = qkv.unbind(1)
        scale = shape.head_dim**-0.5
        values = (query, key, value, cu_seqlens, shape.longest, scale)
        made.append(AttentionExample(*values, boundaries[-1], shape.is_captured))
    return made

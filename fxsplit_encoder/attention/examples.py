"""Segments and values on which kernels are compared for a class of shapes."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from fxsplit_encoder.attention.kernels import AttentionShape


class Example(NamedTuple):
    """The arguments of one call, and how many of its rows lie inside a segment (the first ones)."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    scale: float
    rows: int


def example_lengths(shape: AttentionShape) -> list[list[int]]:
    """Segments that a call of this shape may have.

    One list where the host knows them: one segment of the greatest length, the others share the rest. Two for
    a captured call: as many of the greatest length as there is room for, then empty ones; and all segments
    equal, with rows left over behind the last.
    """
    if shape.equal:
        return [[shape.longest] * shape.segments]
    if shape.exact:
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


def make_examples(shape: AttentionShape) -> list[Example]:
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
        made.append(Example(query, key, value, cu_seqlens, shape.longest, scale, boundaries[-1]))
    return made

"""Kernels of packed attention, and the shapes of their calls.

Shape suffixes: T tokens (rows of the packed sequence), H heads, D head dimension, S segments.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fxsplit_encoder.kernels.kernel import CallShape, CudaKernel, Kernel, round_up

# Numbers of segments that are measured together where the host has the lengths.
_KNOWN_SEGMENTS = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class AttentionShape(CallShape):
    """One call of packed attention; rounded, the class of calls that share a kernel."""

    operation: ClassVar[str] = "attention"

    heads: int
    head_dim: int
    tokens: int
    longest: int
    """Tokens of the longest segment, or an upper bound."""
    segments: int
    """Empty ones included."""
    host_lengths: bool = False
    """Whether the host knows the segments; else the call is for a CUDA graph, and its numbers are bounds."""
    equal: bool = False
    """Whether all segments have `longest` tokens; if not `host_lengths`, they are the entries of a batch."""

    def rounded(self, *, own_tokens: bool = False) -> AttentionShape:
        """Returns the class: numbers rounded up, but not `own_tokens` nor the length of a captured batch."""
        longest, segments = (
            round_up(n, halfway=not self.host_lengths) for n in (self.longest, self.segments)
        )
        if self.equal and not self.host_lengths:
            longest = self.longest
        tokens = longest * segments if self.equal else round_up(self.tokens, halfway=not self.host_lengths)
        if own_tokens:
            tokens = self.tokens
        return replace(self, tokens=tokens, longest=min(longest, tokens), segments=segments)

    def kind(self) -> tuple[int | str, ...]:
        """Returns the heads, and what is known of the segments."""
        return self.heads, self.head_dim, self.host_lengths, self.equal

    def extents(self) -> tuple[int, ...]:
        """Returns the rows, the longest segment and the number of segments."""
        return self.tokens, self.longest, self.segments

    @property
    def is_captured(self) -> bool:
        """Where the host knows the segments, attention runs eagerly."""
        return not self.host_lengths

    def measured_with(self) -> Collection[AttentionShape]:
        """Its own, and for one known segment others of as many tokens: warm-up sees only one."""
        shapes = {self}
        if self.host_lengths and self.segments == 1:
            shapes |= {
                replace(self, longest=self.tokens // segments, segments=segments, equal=equal)
                for segments in _KNOWN_SEGMENTS
                if segments <= self.tokens
                for equal in (False, True)
            }
        return shapes

    def __str__(self) -> str:
        if self.host_lengths:
            known = "equal" if self.equal else "known"
        else:
            known = "captured, equal" if self.equal else "captured"
        return (
            f"{str(self.dtype).removeprefix('torch.')} {self.heads}x{self.head_dim}, tokens {self.tokens}, "
            f"longest {self.longest}, segments {self.segments}, {known}"
        )


# Where a kernel should write, with as many rows as the query; None: to a tensor of its own.
Target = Tensor | None


class AttentionKernel(Kernel[AttentionShape]):
    """Attention within each segment of a packed sequence; segments may change between replays of a graph."""

    needs_equal_segments: ClassVar[bool] = False
    depends_on_tokens: ClassVar[bool] = False
    """Whether a few tokens more may change its time much, so that every number of them is a class."""
    is_invariant: bool = False
    """Whether the bits of a segment's result depend on that segment alone."""

    def is_invariant_on(self, device: torch.device) -> bool:
        """Whether `is_invariant` holds on a device on which it can run."""
        return self.is_invariant

    def __call__(
        self,
        query_THD: Tensor,
        key_THD: Tensor,
        value_THD: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float,
        out_THD: Tensor | None = None,
    ) -> Tensor:
        """Attends; returns `out_THD` or a new contiguous tensor, undefined in rows outside every segment.

        Args:
            query_THD, key_THD, value_THD: (tokens, heads, head_dim); any strides whose last is 1.
            cu_seqlens: (segments + 1,) int32 on the same device, rising from 0; segments may be empty.
            max_seqlen: an upper bound of the longest segment, in tokens.
            scale: factor of the logits.
            out_THD: has at least `tokens` rows and keeps the later ones.
        """
        target = out_THD
        if out_THD is not None and out_THD.shape[0] != query_THD.shape[0]:
            target = out_THD[: query_THD.shape[0]]
        result = self._attend(query_THD, key_THD, value_THD, cu_seqlens, max_seqlen, scale, target)
        if out_THD is None or target is None:
            return result.contiguous()  # it may have the query's strides
        if result is not target:
            target.copy_(result)
        return out_THD

    @abstractmethod
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, into: Target
    ) -> Tensor:
        """Returns `into` if it wrote there (rows as the query's), else another result, of any strides."""


class HalfPrecisionKernel(CudaKernel[AttentionShape], AttentionKernel):
    """A CUDA kernel for 16-bit values whose head_dim is a multiple of 8."""

    max_head_dim: ClassVar[int] = 256

    def supports(self, shape: AttentionShape) -> bool:
        """CUDA, 16-bit values, a multiple of 8 as head_dim, and equal segments where they must be."""
        return (
            shape.device.type == "cuda"
            and shape.dtype in (torch.bfloat16, torch.float16)
            and shape.head_dim % 8 == 0
            and shape.head_dim <= self.max_head_dim
            and (shape.equal or not self.needs_equal_segments)
        )


def as_batch(tensor_THD: Tensor, count: int) -> Tensor:
    """`count` equal segments of a packed sequence as (count, heads, length, head_dim), without a copy."""
    tokens, heads, head_dim = tensor_THD.shape
    return tensor_THD.view(count, tokens // count, heads, head_dim).transpose(1, 2)

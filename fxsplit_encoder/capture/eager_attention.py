"""Attention as captures run it: between graphs, on the true segments of the batch, or inside a graph that has
no masks of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fxsplit_encoder.attention import KnownSegments, attend_out, varlen_attention
from fxsplit_encoder.capture.memory import OwnedBuffers
from fxsplit_encoder.capture.segmented import SegmentedCapture


@dataclass(frozen=True, slots=True)
class Attended:
    """What the attentions over one tensor of cumulative lengths were captured with."""

    rows: int
    """Rows of the query."""
    bound: int
    """No segment may be longer."""


class LiveSegments:
    """The true segments of the batch that runs, by the addresses of its cumulative lengths; eager attention
    steps read them at every replay.
    """

    def __init__(self, rows: int | None = None, segments: Iterable[KnownSegments] = ()) -> None:
        self.attended: dict[int, Attended] = {}
        """What was captured, by the same addresses."""
        self.set(rows, segments)

    def clear(self) -> None:
        """Forgets the batch: all captured rows count as real."""
        self.set(None, ())

    def set(self, rows: int | None, segments: Iterable[KnownSegments]) -> None:
        """The batch's real rows (None: all that are captured) and its segments."""
        self.rows = rows
        self._by_address = {each.cu_seqlens.data_ptr(): each for each in segments}

    def of(self, cu_seqlens: Tensor) -> KnownSegments | None:
        """The segments behind captured cumulative lengths; None where nothing is known."""
        return self._by_address.get(cu_seqlens.data_ptr())

    def note(self, query: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> None:
        """Remembers a captured attention."""
        address, bound = cu_seqlens.data_ptr(), max_seqlen
        if address in self.attended:
            bound = min(bound, self.attended[address].bound)
        self.attended[address] = Attended(query.shape[0], bound)


def break_at_attention(
    capture: SegmentedCapture,
    buffers: OwnedBuffers,
    live: LiveSegments,
    args: tuple[Tensor, Tensor, Tensor, Tensor, int, float],
    *,
    masked: bool,
) -> Tensor:
    """Records an eager attention of the real rows; returns its result, in a buffer that it owns.

    Args:
        args: those of `fxsplit::varlen_attention`.
        masked: whether pad rows are set to zero; else something after it has to keep them finite.
    """
    query, key, value, cu_seqlens = (capture.pool.hold(tensor) for tensor in args[:4])
    max_seqlen, scale = args[4:]
    live.note(query, cu_seqlens, max_seqlen)
    captured_rows = query.shape[0]
    real = (query, key, value)  # of the last replay: the same number of rows often comes again

    def attend_to_real_rows() -> None:
        nonlocal real
        known, rows = live.of(cu_seqlens), live.rows
        real_rows = captured_rows if rows is None else rows
        if real[0].shape[0] != real_rows:
            real = (query[:real_rows], key[:real_rows], value[:real_rows])
        if known is not None:
            known.attend_out(*real, scale, out)
        else:
            attend_out(*real, cu_seqlens, max_seqlen, scale, out)
        end = rows if known is None else known.boundaries[-1]
        if masked and end is not None:
            buffers.clear_behind(out, end)
        elif masked:
            _clear_pad_rows(out, cu_seqlens)

    out, result = buffers.acquire(query, torch.contiguous_format)
    capture.eager(attend_to_real_rows)
    return result


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> Tensor:
    """`fxsplit::varlen_attention` whose rows outside every segment are zero, without a host read."""
    return _clear_pad_rows(varlen_attention(query, key, value, cu_seqlens, max_seqlen, scale), cu_seqlens)


def _clear_pad_rows(out: Tensor, cu_seqlens: Tensor) -> Tensor:
    row = torch.arange(out.shape[0], dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return out.masked_fill_((row >= cu_seqlens[-1])[:, None, None], 0)

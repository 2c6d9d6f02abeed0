"""FlashAttention 4 over one long segment, its queries cut where tiles fill the GPU a whole number of times.

A tile of queries of a head is a block, and a multiprocessor of Hopper holds one block of the large tiles at
a time. So a call takes a multiple of what a block takes: 3136 tokens of 16 heads are 272 blocks, which are
two waves of 132 and a third of 8. Cut, 3072 queries fill two waves less 8 blocks, and the other 64 go to
smaller tiles beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.branches import Branch
from fxsplit_encoder.attention.kernels.base import AttentionShape
from fxsplit_encoder.attention.kernels.flash_attn import FlashAttention4
from fxsplit_encoder.kernels.base import processors

# Queries of the tile that the package takes for itself on Hopper, by the widest heads that get it
# (`_tile_size_fwd_sm90` of flash-attn-4 4.0.0b36). Were it another, cuts would be off whole waves, and lose
# when they are measured.
_OWN_ROWS = ((96, 192), (128, 128))

# What lets the package choose.
_OWN: Mapping[str, Any] = {}

# Behind so many whole waves, one that is nearly empty is a small part of the time: such segments are neither
# cut nor measured.
_MOST_WAVES = 4

# The same where more than this part of the last wave is full. On an H200, with 16 heads of 80, 0.67 of it, at
# 4096 tokens, left 4 % to gain; 0.06, at 3136, left 22 %.
_FULLEST_LAST_WAVE = 0.5


def rows_of_whole_waves(rows: int, heads: int, tile_rows: int, processors: int) -> int:
    """The first queries of a segment whose tiles fill all multiprocessors a whole number of times, as nearly
    as tiles of all heads allow; 0 where there is nothing to cut.

    Args:
        rows: queries.
        tile_rows: queries of a tile.
        processors: multiprocessors, each of which holds one tile of one head at a time.
    """
    if not processors:
        return 0
    waves, last = divmod(-(-rows // tile_rows) * heads, processors)
    cut = waves * processors // heads * tile_rows
    pays = 1 <= waves <= _MOST_WAVES and last <= _FULLEST_LAST_WAVE * processors
    return cut if pays and cut < rows else 0


class WholeWaves(FlashAttention4):
    """The queries that fill whole waves by the package's own tiles, the rest by smaller ones on a sibling
    stream, which inside a CUDA graph is a branch of it. Every query attends to all keys.

    Where to cut follows from the rows of the call, which a capture has as its capacity; which queries exist
    is read on the device, so a shorter segment is right too. Segments may be several: they are cut at the
    same row, wherever they begin, but only one is offered, since waves of several cannot be counted ahead.

    Args:
        tile: queries and keys of a step for the rest.
        probabilities_in_registers: for the rest, as for `FlashAttention4`.
    """

    depends_on_tokens = True

    def __init__(self, tile: tuple[int, int], *, probabilities_in_registers: bool | None = None) -> None:
        super().__init__(tile, probabilities_in_registers=probabilities_in_registers)
        self.name = f"flash_attn_4_waves_{tile[0]}x{tile[1]}"

    def supports(self, shape: AttentionShape) -> bool:
        """One segment, in graphs, that is some whole waves long and a part of one."""
        return (
            super().supports(shape)
            and shape.segments == 1
            and self._cut(shape.tokens, shape.heads, shape.head_dim, shape.device) > 0
        )

    def _cut(self, rows: int, heads: int, head_dim: int, device: torch.device) -> int:
        tile_rows = next((own for widest, own in _OWN_ROWS if head_dim <= widest), None)
        return 0 if tile_rows is None else rows_of_whole_waves(rows, heads, tile_rows, processors(device))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float,
        target: Tensor | None,
    ) -> Tensor:
        rows, heads, head_dim = query.shape
        cut = self._cut(rows, heads, head_dim, query.device)
        if not cut:  # a call that is pinned, or of another size than what was measured
            lengths = (cu_seqlens, cu_seqlens, max_seqlen)
            return self._packed(query, key, value, lengths, scale, target, _OWN)
        # Made here, so that nothing is allocated beside that this stream could be given while it is in use.
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if target is None else target
        first = cu_seqlens.clamp(max=cut)
        rest = torch.empty_like(first)
        branch = Branch(query.device, "attention")
        branch.fork()
        # The large part first: its blocks should be the ones that get free multiprocessors.
        lengths = (first, cu_seqlens, max_seqlen)
        self._packed(query[:cut], key, value, lengths, scale, out[:cut], _OWN)
        with branch:
            torch.sub(cu_seqlens, first, out=rest)
            lengths = (rest, cu_seqlens, max_seqlen)
            self._packed(query[cut:], key, value, lengths, scale, out[cut:], self._variant)
        branch.join()
        return out

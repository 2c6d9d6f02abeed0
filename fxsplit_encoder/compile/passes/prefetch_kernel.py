"""The kernel behind `fxsplit::prefetch`. Imported only where Triton is installed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# What one instruction fetches, and how many each program of the few that there are issues at once: attention
# should keep the multiprocessors.
_CHUNK = 4096
_BLOCK = 128
_PROGRAMS = 4

# An address and a size are multiples of this.
_ALIGNMENT = 16


# One version serves all weights.
@triton.jit(do_not_specialize=["address", "chunks", "last_bytes"])  # type: ignore[untyped-decorator]
def prefetch_chunks(address, chunks, last_bytes, CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Asks for `chunks` times `CHUNK` bytes from `address` on, of the last one for `last_bytes`."""
    for first in range(tl.program_id(0) * BLOCK, chunks, tl.num_programs(0) * BLOCK):
        chunk = tl.minimum(first + tl.arange(0, BLOCK), chunks - 1)
        where = address + chunk.to(tl.int64) * CHUNK
        size = tl.where(chunk == chunks - 1, last_bytes, CHUNK)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [where, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def prefetch(weights: Sequence[Tensor]) -> None:
    """Asks for the memory of some tensors, on the current stream of their device. The first call compiles."""
    with torch.cuda.device(weights[0].device):
        for weight in weights:
            address, num_bytes = extent(weight)
            if num_bytes:
                chunks = -(-num_bytes // _CHUNK)
                last = num_bytes - (chunks - 1) * _CHUNK
                prefetch_chunks[(_PROGRAMS,)](address, chunks, last, CHUNK=_CHUNK, BLOCK=_BLOCK)


def extent(weight: Tensor) -> tuple[int, int]:
    """The address and the bytes of a tensor without gaps, aligned as the instruction needs; 0 bytes for
    another.
    """
    num_bytes = weight.numel() * weight.element_size() // _ALIGNMENT * _ALIGNMENT
    span = 1 + sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    is_dense = span == weight.numel() and weight.data_ptr() % _ALIGNMENT == 0
    return weight.data_ptr(), num_bytes if is_dense else 0

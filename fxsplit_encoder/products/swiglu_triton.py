"""`products.swiglu` in Triton, rounded once. Imported only where that is installed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Four results, 16 bytes of pairs, for each of the threads of four warps, twice.
_BLOCK = 1024
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(pairs, result, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * BLOCK
    pair = 2 * first + tl.arange(0, 2 * BLOCK)
    values = tl.load(pairs + pair, mask=pair < 2 * count, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(values, (BLOCK, 2)))
    entry = first + tl.arange(0, BLOCK)
    product = gate * tl.sigmoid(gate) * up
    tl.store(result + entry, product.to(result.dtype.element_ty), mask=entry < count)


def swiglu_of_pairs(values: Tensor) -> Tensor:
    """Of contiguous (rows, 2 * features), (rows, features)."""
    result = values.new_empty(values.shape[0], values.shape[1] // 2)
    if count := result.numel():
        _swiglu[(triton.cdiv(count, _BLOCK),)](values, result, count, _BLOCK, num_warps=_WARPS)
    return result

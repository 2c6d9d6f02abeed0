"""A Triton kernel that compares sampled bits with earlier ones. Imported only where Triton is installed."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fxsplit_encoder._torch.device import on_device

# Few for each program: loads of scattered addresses take as long as memory does, however few.
_BLOCK = 256
_WARPS = 4


# No number of samples gets a version of its own.
@triton.jit(do_not_specialize=["count", "takes"])  # type: ignore[untyped-decorator]
def _compare(addresses, before, state, count, takes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores the bits of BLOCK samples, or compares them and writes state[0] to the address state[1]."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(addresses + index, mask=index < count, other=0)
    expected = tl.load(before + index, mask=index < count, other=0)
    is_sample = address != 0
    now = tl.load(address.to(tl.pointer_type(tl.int16)), mask=is_sample, other=0)
    if takes != 0:
        tl.store(before + index, now, mask=is_sample)
    elif tl.max((is_sample & (now != expected)).to(tl.int32), axis=0) != 0:
        found = tl.load(state + 1).to(tl.pointer_type(tl.int64))
        tl.store(found, tl.load(state))


def compare_bits(addresses: Tensor, before: Tensor, state: Tensor, *, takes: bool) -> None:
    """Stores (`takes`) in `before`, (samples,) int16, or compares with it the two bytes at each of
    `addresses`, (samples,) int64, 0 for none; where any differ, writes state[0] to the address state[1], both
    int64.
    """
    count = addresses.shape[0]
    with on_device(addresses.device):
        compiled = _compare[triton.cdiv(count, _BLOCK),](
            addresses, before, state, count, int(takes), _BLOCK, num_warps=_WARPS
        )
    if compiled is not None:  # Triton's interpreter compiles nothing
        _KERNELS.by_hash[compiled.hash] = compiled


class _Kernels:
    """The kernels compiled in this process."""

    def __init__(self) -> None:
        self.by_hash: dict[str, Any] = {}


_KERNELS = _Kernels()


def compiled_kernels() -> list[Any]:
    """Returns the kernels compiled in this process."""
    return list(_KERNELS.by_hash.values())

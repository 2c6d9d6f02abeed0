"""A Triton kernel of the tests' own, which nothing else compiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

BLOCK = 256


@triton.jit
def _add(source, target, number, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + rows, tl.load(source + rows) + number)


def add_number(x: Tensor, number: int) -> Tensor:
    """`x + number`; the length is a multiple of `BLOCK`."""
    result = torch.empty_like(x)
    _add[(x.numel() // BLOCK,)](x, result, number, BLOCK)
    return result


def forget_compiled() -> None:
    """The next call compiles the kernel, or at least loads it, anew."""
    _add.device_caches.clear()

"""The Triton kernel in Triton's interpreter, where Triton is installed. GPU tests take it as every kernel."""

from __future__ import annotations

import numpy
import pytest
from packaging.version import Version

from .fakes import run_with_triton

CHECK = """
import itertools, torch
from fxsplit_encoder.kernels.attention.triton_code import attend
from fxsplit_encoder.kernels.attention.builtin import Tile

torch.manual_seed(0)
for head_dim in (8, 64, 72, 88, 128):
    for lengths in ([40], [5, 0, 70, 1, 0, 33], [64, 64, 64, 0, 0]):
        tokens, heads = sum(lengths), 2
        q, k, v = torch.randn(tokens + 9, 3, heads, head_dim, dtype=torch.float16).unbind(1)
        boundaries = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        out = torch.full((tokens + 9, heads, head_dim), 7.0, dtype=torch.float16)
        attend(q, k, v, boundaries, 0.3, out, Tile(32, 16, num_warps=4, num_stages=2))
        expected = torch.full(out.shape, 7.0)
        for start, end in itertools.pairwise(boundaries.tolist()):
            a, b, c = (x[start:end].float().transpose(0, 1) for x in (q, k, v))
            expected[start:end] = (torch.softmax(a @ b.transpose(1, 2) * 0.3, -1) @ c).transpose(0, 1)
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=3e-3)
"""


def test_it_attends_within_segments_and_writes_nothing_else() -> None:
    triton = pytest.importorskip("triton")
    if Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"):
        pytest.skip("the interpreter of Triton before 3.7 takes an array of one entry for a number")
    run_with_triton(CHECK, TRITON_INTERPRET="1")


def test_heads_are_split_in_two_powers_of_two() -> None:
    pytest.importorskip("triton")
    from fxsplit_encoder.kernels.attention.triton_code import split_head

    for head_dim in range(8, 129, 8):
        low, high = split_head(head_dim)
        assert low + high >= head_dim
        assert all(part == 0 or (part >= 16 and part & (part - 1) == 0) for part in (low, high))
        assert low > 0
    assert [split_head(n) for n in (64, 72, 80, 88, 128)] == [(64, 0), (64, 16), (64, 16), (64, 32), (128, 0)]

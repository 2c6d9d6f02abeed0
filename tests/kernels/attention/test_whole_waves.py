"""The kernel that cuts a segment's queries, over a stand-in for the package's function that does what its
arguments say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.kernels import kernel as kernel_module
from fxsplit_encoder.kernels.attention import KERNELS, AttentionShape, flash_attn
from fxsplit_encoder.kernels.attention.flash_attn import WholeWaves, rows_of_whole_waves

from .fakes import FakeFlashAttention, assert_attends, cumulative, fused_qkv

HEADS, HEAD_DIM = 3, 8
TILE = 4
"""Queries of the large tiles here."""
PROCESSORS = 6


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakeFlashAttention:
    """Small tiles and a small GPU: 2 tiles a wave, of 4 queries each."""
    fake = FakeFlashAttention()
    monkeypatch.setattr(kernel_module, "find", lambda module, attribute: (fake, None))
    monkeypatch.setattr(flash_attn, "processors", lambda device: PROCESSORS)
    monkeypatch.setattr(flash_attn, "_OWN_ROWS", ((HEAD_DIM, TILE),))
    return fake


def test_every_row_is_right_whatever_part_of_the_capacity_is_used(package: FakeFlashAttention) -> None:
    @settings(max_examples=60)
    @given(st.integers(1, 45), st.data())
    def check(capacity: int, data: Any) -> None:
        length = data.draw(st.integers(1, capacity))
        values = fused_qkv(capacity, HEADS, HEAD_DIM, seed=length)
        assert_attends(WholeWaves((2, 4)), values, [length], capacity, 0.3)

    check()
    assert {call["tile"] for call in package.calls} == {None, (2, 4)}


@pytest.mark.parametrize("lengths", [[3, 9, 4], [1, 0, 17, 0], [0, 8, 8], [2, 2, 2]])
def test_several_segments_are_right_too(package: FakeFlashAttention, lengths: Sequence[int]) -> None:
    assert_attends(WholeWaves((2, 4)), fused_qkv(18, HEADS, HEAD_DIM), lengths, 18, 0.3)
    assert [call["rows"] for call in package.calls] == [16, 2] * 2


def test_the_rest_gets_the_small_tiles(package: FakeFlashAttention) -> None:
    kernel = WholeWaves((2, 4), probabilities_in_registers=True)
    q, k, v = fused_qkv(19, HEADS, HEAD_DIM)
    kernel(q, k, v, cumulative([19]), 19, 0.3)
    assert package.calls == [
        {"rows": 16, "tile": None, "registers": None},
        {"rows": 3, "tile": (2, 4), "registers": True},
    ]
    package.calls.clear()
    kernel(q[:16], k[:16], v[:16], cumulative([16]), 16, 0.3)  # whole waves as it is
    assert package.calls == [{"rows": 16, "tile": None, "registers": None}]


@pytest.mark.parametrize(
    ("rows", "cut"),
    [
        (1536, 0),  # 128 blocks of 132: less than a wave
        (1764, 1536),
        (3136, 3072),
        (4096, 0),  # the last wave is two thirds full
        (5184, 4608),
        (7056, 6336),
        (6336, 0),  # four waves
        (9216, 0),  # more waves than are worth a cut
    ],
)
def test_cuts_on_hopper(rows: int, cut: int) -> None:
    assert rows_of_whole_waves(rows, heads=16, tile_rows=192, processors=132) == cut
    without_gpu = kernel_module.processors(torch.device("cpu"))
    assert without_gpu == rows_of_whole_waves(rows, 16, 192, without_gpu) == 0


@settings(max_examples=200)
@given(st.integers(1, 20_000), st.integers(1, 200), st.sampled_from([64, 128, 192]), st.integers(0, 200))
def test_what_is_cut_off_are_whole_waves(rows: int, heads: int, tile_rows: int, processors: int) -> None:
    cut = rows_of_whole_waves(rows, heads, tile_rows, processors)
    assert 0 <= cut < rows
    assert cut % tile_rows == 0
    if cut:
        blocks = cut // tile_rows * heads
        # Nothing of a whole wave is left but what tiles of all heads do not divide.
        assert blocks % processors == 0 or processors - blocks % processors < heads
        assert -(-blocks // processors) < -(-(-(-rows // tile_rows) * heads) // processors)


def test_it_is_offered_for_one_long_captured_segment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "processors", lambda device: 132)
    kernels = [kernel for kernel in KERNELS if isinstance(kernel, WholeWaves)]
    assert [kernel.name for kernel in kernels] == ["flash_attn_4_waves_64x128", "flash_attn_4_waves_128x128"]

    def offered(head_dim: int = 72, **fields: Any) -> set[bool]:
        values = {"tokens": 3136, "longest": 3136, "segments": 1, **fields}
        shape = AttentionShape(torch.device("cuda"), torch.bfloat16, 16, head_dim, **values)
        return {kernel.supports(shape) for kernel in kernels}

    assert offered() == offered(head_dim=80) == offered(equal=True) == {True}
    assert offered(head_dim=128) == {True}  # 128 queries a tile: 3136 are three waves and a part
    assert offered(segments=2) == offered(host_lengths=True) == {False}
    assert offered(tokens=1024, longest=1024) == offered(tokens=16384, longest=16384) == {False}
    assert offered(head_dim=192) == {False}

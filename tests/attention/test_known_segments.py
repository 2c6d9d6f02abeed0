"""Attention over known segments: whatever kernels share them, each segment attends to itself alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.attention import KnownSegments, attend
from fxsplit_encoder.attention import known_segments as segments

DENSE_FROM = 5


def known(lengths: list[int]) -> KnownSegments:
    boundaries = [0, *itertools.accumulate(lengths)]
    return KnownSegments(torch.tensor(boundaries, dtype=torch.int32), boundaries)


def random_qkv(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(rows, 3, 2, 4, generator=torch.Generator().manual_seed(rows)).unbind(1)
    return q, k, v


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """As on a device where segments of 5 and more go to a dense kernel: the shapes that it got."""
    calls: list[tuple[int, ...]] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Tensor]:
        calls.append((q.shape[0], q.shape[2]))
        return (torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale),)

    monkeypatch.setattr(segments, "_cudnn_forward", forward)
    monkeypatch.setattr(segments, "supports_flash", lambda query: True)
    monkeypatch.setattr(segments, "dense_from", lambda *kind: DENSE_FROM)
    monkeypatch.setattr(segments, "_shapes", segments._Shapes())
    return calls


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([0, 1, 3, 5, 6, 9]), max_size=8), st.booleans())
def test_kernels_that_share_the_segments_equal_one(
    dense: list[tuple[int, ...]], lengths: list[int], has_come_before: bool
) -> None:
    q, k, v = random_qkv(sum(lengths))
    expected = attend(q, k, v, known(lengths).cu_seqlens, max(lengths, default=0), 0.5)
    if has_come_before:
        known(lengths).attend(q, k, v, 0.5)
    torch.testing.assert_close(known(lengths).attend(q, k, v, 0.5), expected)
    out = torch.full((sum(lengths) + 2, 2, 4), 7.0)
    assert known(lengths).attend_out(q, k, v, 0.5, out) is out
    torch.testing.assert_close(out[:-2], expected)
    assert out[-2:].eq(7).all()


def test_neighbours_of_one_length_are_one_dense_batch_from_the_second_time_on(
    dense: list[tuple[int, ...]],
) -> None:
    lengths = [2, 6, 6, 6, 3, 3, 9]
    q, k, v = random_qkv(sum(lengths))
    known(lengths).attend(q, k, v, 0.5)
    assert dense == []
    again = known(lengths)
    for _ in range(2):  # two layers of one batch
        again.attend(q, k, v, 0.5)
    assert dense == [(3, 6), (1, 9)] * 2
    known([6]).attend(*random_qkv(6), 0.5)
    assert len(dense) == 4  # a batch of one is another shape, and new


def test_only_so_many_shapes_are_planned(dense: list[tuple[int, ...]], monkeypatch: Any) -> None:
    monkeypatch.setattr(segments, "_MOST_SHAPES", 1)
    for _ in range(2):
        for length in (6, 7):
            known([length]).attend(*random_qkv(length), 0.5)
    assert dense == [(1, 6)]


def test_without_a_flash_kernel_all_segments_are_packed() -> None:
    lengths = [6, 6]
    q, k, v = random_qkv(12)
    segments_of_batch = known(lengths)
    segments_of_batch.attend(q, k, v, 0.5)
    assert [type(run).__name__ for run in segments_of_batch._plan(q)] == ["_Packed"]


def test_dense_attention_counts_from_the_shortest_length_where_it_gains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {4096: (10.0, 5.0), 3072: (8.0, 6.0), 2048: (5.0, 4.9), 1536: (4.0, 1.0)}
    monkeypatch.setattr(segments, "_measure", lambda device, heads, dim, dtype, length: times[length])
    measure = segments.dense_from.__wrapped__
    assert measure(torch.device("cpu"), 16, 72, torch.bfloat16) == 3072
    times[4096] = (10.0, 9.9)
    assert measure(torch.device("cpu"), 16, 72, torch.bfloat16) is None

    def refuse(*kind: Any) -> Any:
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(segments, "_measure", refuse)
    assert measure(torch.device("cpu"), 16, 72, torch.bfloat16) is None

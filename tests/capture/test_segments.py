from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.capture.inputs import (
    fill_cu_seqlens,
    is_cumulative,
    pad_cu_seqlens,
    pad_cu_seqlens_on_device,
    segment_capacity,
)
from fxsplit_encoder.errors import InputError, ReplayError
from tests.kernels.attention.fakes import cumulative

lengths = st.lists(st.integers(0, 50), max_size=20)


@given(lengths, st.integers(1, 12), st.integers(0, 100))
def test_padded_lengths_rise_stay_in_bounds_and_keep_the_real_part(
    segments: list[int], spare: int, pad_rows: int
) -> None:
    given_lengths = cumulative(segments)
    rows = int(given_lengths[-1]) + pad_rows
    padded = pad_cu_seqlens(tuple(given_lengths.tolist()), len(given_lengths) + spare, rows)
    assert padded.dtype == torch.int32
    assert padded.shape == (len(given_lengths) + spare,)
    assert torch.equal(padded[: len(given_lengths)], given_lengths)
    assert (padded.diff() >= 0).all()
    assert padded[len(given_lengths) :].eq(given_lengths[-1]).all()
    assert torch.equal(pad_cu_seqlens_on_device(given_lengths, len(padded)), padded)
    assert padded.diff().max() == max(segments, default=0) <= rows


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 9))
def test_empty_segments_at_the_end_take_no_room(segments: list[int], empty: int) -> None:
    real = cumulative(segments)
    padded = pad_cu_seqlens((*real.tolist(), *real[-1:].tolist() * empty), len(real), int(real[-1]))
    assert torch.equal(padded, real)


@pytest.mark.parametrize("given_lengths", [[], [1, 2], [0, 5, 4], [0, -1]])
def test_lengths_that_do_not_rise_from_0_are_refused(given_lengths: list[int]) -> None:
    with pytest.raises(InputError, match="cu_seqlens: expected entries that rise from 0"):
        pad_cu_seqlens(tuple(given_lengths), 8, 100)


def test_padded_lengths_are_kept_for_captures_of_the_same_size() -> None:
    kept = pad_cu_seqlens((0, 3, 7), 5, 9)
    assert pad_cu_seqlens((0, 3, 7), 5, 9) is kept
    assert pad_cu_seqlens((0, 3, 7), 6, 9).tolist() == [0, 3, 7, 7, 7, 7]
    assert kept.tolist() == [0, 3, 7, 7, 7]
    with torch.inference_mode():
        assert not pad_cu_seqlens((0, 1), 2, 1).is_inference()


def test_what_does_not_fit_is_refused() -> None:
    given_lengths = (0, 2, 4, 6)
    with pytest.raises(ReplayError, match="3 segments over 6 rows do not fit a capture of 2 segments over 9"):
        pad_cu_seqlens(given_lengths, 3, 9)
    with pytest.raises(ReplayError, match="over 5 rows"):
        pad_cu_seqlens(given_lengths, 9, 5)
    with pytest.raises(ReplayError, match="4 entries do not fit a capture of 3"):
        pad_cu_seqlens_on_device(torch.tensor(given_lengths), 3)


def test_a_budget_holds_segments_of_typical_size_within_the_users_limit() -> None:
    assert segment_capacity(4096, 1000) == 128
    assert segment_capacity(64, 1000) == 8
    assert segment_capacity(4096, 5) == 5
    assert segment_capacity(4096, 0) == 1


@given(lengths, st.integers(0, 5))
def test_a_buffer_is_filled_to_its_end(segments: list[int], spare: int) -> None:
    value = cumulative(segments)
    buffer = torch.full((len(value) + spare,), -1, dtype=torch.int32)
    fill_cu_seqlens(buffer, value)
    assert buffer.tolist() == [*value.tolist(), *[int(value[-1])] * spare]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (cumulative([2, 3]), True),
        (cumulative([2, 0]), True),
        (torch.tensor([0, 2, 1], dtype=torch.int32), False),
        (torch.tensor([1, 2], dtype=torch.int32), False),
        (torch.zeros(3, dtype=torch.int32), False),
        (torch.tensor([0, 2]), False),
        (torch.tensor([0], dtype=torch.int32), False),
        (torch.zeros(2, 2, dtype=torch.int32), False),
    ],
)
def test_cumulative_lengths_are_recognized(tensor: torch.Tensor, expected: bool) -> None:
    assert is_cumulative(tensor) == expected

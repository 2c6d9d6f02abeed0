from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import vision_utils

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers.grid import (
    count_patches,
    cumulative_lengths,
    frame_lengths,
    merge,
    merge_permutation,
    positions,
    read_grids,
    window_lengths,
    window_permutation,
)

Grids = list[tuple[int, int, int]]


@st.composite
def batches(draw: st.DrawFn, merge: int = 2) -> Grids:
    sides = st.integers(1, 20).map(lambda n: n * merge)
    return draw(st.lists(st.tuples(st.integers(1, 4), sides, sides), min_size=1, max_size=4))


@settings(max_examples=50)
@given(st.sampled_from([1, 2, 3]).flatmap(lambda m: st.tuples(st.just(m), batches(merge=m))))
def test_positions_are_those_of_transformers(case: tuple[int, Grids]) -> None:
    merge, grids = case
    expected = vision_utils.get_vision_position_ids(torch.tensor(grids), merge)
    result = positions(grids, merge)
    assert result.dtype == torch.int64
    assert torch.equal(result, expected)


@settings(max_examples=80)
@given(
    st.sampled_from([1, 2, 3]).flatmap(lambda m: st.tuples(st.just(m), batches(merge=m))), st.integers(1, 5)
)
def test_windows_are_those_of_transformers(case: tuple[int, Grids], window: int) -> None:
    merge, grids = case
    tokens, boundaries = vision_utils.get_vision_window_index(
        torch.tensor(grids), merge, window * merge * 7, 7
    )
    order = window_permutation(grids, merge, window)
    assert order.dtype == torch.int64
    assert torch.equal(order.view(-1, merge**2) // merge**2, tokens[:, None].expand(-1, merge**2))
    assert order.sort().values.tolist() == list(range(count_patches(grids)))
    assert cumulative_lengths(window_lengths(grids, merge, window)).tolist() == boundaries.tolist()


@settings(max_examples=50)
@given(batches())
def test_segments_are_those_of_transformers(grids: Grids) -> None:
    expected = vision_utils.get_vision_cu_seqlens(torch.tensor(grids))
    result = cumulative_lengths(frame_lengths(grids))
    assert result.dtype == np.int32
    assert result.tolist() == expected.tolist()
    assert count_patches(grids) == expected[-1] == len(positions(grids, 2))
    assert len(frame_lengths(grids)) == sum(t for t, _, _ in grids)


def test_no_items_make_empty_tensors_of_the_same_kind() -> None:
    assert positions([], 2).shape == (0, 2)
    assert (window_permutation([], 2, 4).shape, window_permutation([], 2, 4).dtype) == ((0,), torch.int64)
    assert window_lengths([], 2, 4) == []
    assert cumulative_lengths([]).tolist() == [0]
    assert count_patches([]) == 0
    assert read_grids([], 2) == []
    assert read_grids(torch.zeros(0, 3, dtype=torch.int64), 2) == []


@pytest.mark.parametrize(
    "grids",
    [
        [[1, 4, 6], [2, 8, 2]],
        ((1, 4, 6), (2, 8, 2)),
        torch.tensor([[1, 4, 6], [2, 8, 2]]),
        np.array([[1, 4, 6], [2, 8, 2]], dtype=np.int32),
        [torch.tensor([1, 4, 6]), torch.tensor([2, 8, 2])],
        [np.array([1, 4, 6]), [2, np.int64(8), 2]],
    ],
    ids=["lists", "tuples", "tensor", "array", "tensors", "arrays"],
)
def test_grids_are_read_from_any_container(grids: Any) -> None:
    result = read_grids(grids, 2)
    assert result == [(1, 4, 6), (2, 8, 2)]
    assert all(type(n) is int for grid in result for n in grid)


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ([[1, 4]], r"rows of three integers .* got \[1, 4\]"),
        ([1, 4, 4], "rows of three integers .* got 1"),
        (torch.tensor(5), "got 5"),
        (torch.tensor([[1.0, 4.5, 4.0]]), r"got \[1.0, 4.5, 4.0\]"),
        ([["1", 4, 4]], r"got \['1', 4, 4\]"),
        ([None], "got None"),
        ([[1, 4, 4], [0, 4, 4]], r"at least 1 frame .* got \(0, 4, 4\)"),
        ([[1, 4, -2]], r"got \(1, 4, -2\)"),
        ([[1, 5, 4]], r"merge size 2 in patches; got \(1, 5, 4\)"),
    ],
)
def test_an_error_names_the_field_and_the_value(grids: Any, message: str) -> None:
    with pytest.raises(InputError, match=rf"^video_grid_thw: .*{message}"):
        read_grids(grids, 2, "video_grid_thw")


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)), max_size=4),
    st.integers(1, 3),
)
def test_rows_merge_as_by_blocks_of_every_frame(blocks: list[tuple[int, int, int]], side: int) -> None:
    grids = [(t, h * side, w * side) for t, h, w in blocks]
    rows = torch.arange(float(sum(t * h * w for t, h, w in grids)))[:, None]
    expected = []
    for (t, h, w), item in zip(grids, rows.split([t * h * w for t, h, w in grids]), strict=True):
        image = item.view(t, h // side, side, w // side, side)
        expected.append(image.transpose(2, 3).reshape(-1, side * side, 1))
    order = merge_permutation(grids, side)
    assert order.dtype == torch.int64
    assert order.sort()[0].tolist() == list(range(len(rows)))
    assert torch.equal(
        merge(rows, order, side * side), torch.cat([torch.zeros(0, side * side, 1), *expected])
    )

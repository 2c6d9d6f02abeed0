from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import vision_utils

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers.grid import (
    TAPS,
    cosines_and_sines,
    count_patches,
    cumulative_lengths,
    frame_lengths,
    frame_positions,
    gives_angles,
    merge,
    merge_permutation,
    positions,
    read_grids,
    resample,
    table_metadata,
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
        (torch.tensor(5), "got 5"),
        (torch.tensor([[1.0, 4.5, 4.0]]), r"got \[1.0, 4.5, 4.0\]"),
        ([["1", 4, 4]], r"got \['1', 4, 4\]"),
        ([[1, 4, 4], [0, 4, 4]], r"at least 1 frame .* got \(0, 4, 4\)"),
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


def test_a_batch_of_one_frame_does_not_share_the_memory_of_the_caches() -> None:
    # What a tower makes may become a capture's static buffer, which replays overwrite.
    kept = frame_positions(2, 8, 2).copy()
    positions([(1, 2, 8)], 2).zero_()
    assert (frame_positions(2, 8, 2) == kept).all()


# --- position embeddings


sides = st.integers(1, 70)


@settings(max_examples=80)
@given(batches(), st.sampled_from([4, 9, 48]), st.booleans(), st.sampled_from(list(TAPS)))
@example([(1, 2, 96), (1, 48, 48), (1, 180, 240)], 48, True, "bilinear")
@example([(1, 2, 2), (1, 96, 2), (1, 50, 34)], 48, False, "bilinear")
def test_taps_are_bit_equal_to_those_of_transformers(
    grids: Grids, side: int, align_corners: bool, mode: Any
) -> None:
    expected_indices, expected_weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor(grids), side, mode=mode, align_corners=align_corners, spatial_merge_size=2
    )
    _, indices, weights = table_metadata(grids, (side, side), 2, align_corners, mode).values()
    assert (indices.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(indices, expected_indices.int())
    assert torch.equal(weights, expected_weights)


@settings(max_examples=60)
@given(sides, sides, st.sampled_from([(8, 8), (64, 64), (6, 11)]), st.sampled_from(list(TAPS)))
def test_a_resampled_table_is_that_of_interpolate(
    height: int, width: int, table: tuple[int, int], mode: Any
) -> None:
    values = torch.rand(*table, 3, generator=torch.Generator().manual_seed(height))
    _, *taps = table_metadata([(1, height, width)], table, 1, False, mode).values()
    result = resample(values.flatten(0, 1), *taps)
    channels_first = values.permute(2, 0, 1)[None]
    expected = F.interpolate(channels_first, size=(height, width), mode=mode, align_corners=False)
    torch.testing.assert_close(result, expected[0].flatten(1).t(), rtol=0, atol=1e-5)


# --- a rotary embedding

FREQUENCIES = torch.tensor([1.0, 0.1, 0.01])


class Angles(nn.Module):
    def forward(self, position_ids: Tensor) -> Tensor:
        return (position_ids.unsqueeze(-1) * FREQUENCIES).flatten(1)


class CosinesAndSines(nn.Module):
    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[:, :, None] * FREQUENCIES).flatten(1).repeat(1, 2)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


def test_both_forms_are_told_apart_and_agree() -> None:
    hidden, positions = torch.zeros(4, 12), torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    old, new = Angles(), CosinesAndSines()
    assert gives_angles(old)
    assert not gives_angles(new)
    for got, expected in zip(
        cosines_and_sines(old, hidden, positions, from_angles=True),
        cosines_and_sines(new, hidden, positions, from_angles=False),
        strict=True,
    ):
        assert got.shape == (4, 12)
        torch.testing.assert_close(got, expected)

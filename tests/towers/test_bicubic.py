import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import vision_utils

from fxsplit_encoder.towers.bicubic import bicubic, frame_bicubic, resample
from fxsplit_encoder.towers.merge import merge, merge_order

sides = st.integers(1, 70)


def interpolated(table: torch.Tensor, height: int, width: int) -> torch.Tensor:
    channels_first = table.permute(2, 0, 1).unsqueeze(0)
    result = F.interpolate(channels_first, size=(height, width), mode="bicubic", align_corners=False)
    return result.squeeze(0).permute(1, 2, 0).flatten(0, 1)


@settings(max_examples=40, deadline=None)
@given(sides, sides, st.sampled_from([(8, 8), (64, 64), (6, 11)]))
def test_a_resampled_table_is_that_of_interpolate(height: int, width: int, table: tuple[int, int]) -> None:
    values = torch.rand(*table, 3, generator=torch.Generator().manual_seed(height))
    indices, weights = bicubic([(1, height, width)], *table)
    assert (indices.dtype, weights.dtype) == (torch.int32, torch.float32)
    result = resample(values, indices, weights)
    # In double precision: interpolate's own error in single precision is up to 4e-5 for these sizes.
    expected = interpolated(values.double(), height, width)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [(8, 8), (16, 4), (2, 32), (6, 10)])
def test_the_taps_resample_as_those_of_transformers(size: tuple[int, int]) -> None:
    values = torch.rand(8, 8, 3)
    theirs = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, *size]]), 8, mode="bicubic", align_corners=False
    )
    mine = bicubic([(1, *size)], 8, 8)
    torch.testing.assert_close(resample(values, *mine), resample(values, *theirs), rtol=0, atol=5e-6)


def test_a_table_of_the_images_size_is_taken_as_it_is() -> None:
    table = torch.randn(6, 4, 3)
    assert torch.equal(resample(table, *bicubic([(1, 6, 4)], 6, 4)), table.flatten(0, 1))


def test_frames_and_items_follow_one_another() -> None:
    indices, weights = bicubic([(2, 4, 2), (1, 2, 6)], 8, 8)
    frames = [frame_bicubic(*size, 8, 8) for size in ((4, 2), (4, 2), (2, 6))]
    assert np.array_equal(indices, np.concatenate([taps for taps, _ in frames]))
    assert np.array_equal(weights, np.concatenate([values for _, values in frames]))
    assert [tensor.shape for tensor in bicubic([], 8, 8)] == [(0, 16), (0, 16)]


@settings(max_examples=40, deadline=None)
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
    order = merge_order(grids, side)
    assert order.dtype == torch.int64
    assert order.sort()[0].tolist() == list(range(len(rows)))
    assert torch.equal(
        merge(rows, order, side * side), torch.cat([torch.zeros(0, side * side, 1), *expected])
    )

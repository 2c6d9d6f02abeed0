from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import vision_utils

from fxsplit_encoder.towers.grid import (
    TAPS,
    cosines_and_sines,
    gives_angles,
    interpolation,
    resample,
)

Grids = list[tuple[int, int, int]]
sides = st.integers(1, 70)
even_sides = st.integers(1, 20).map(lambda n: 2 * n)
batches = st.lists(st.tuples(st.integers(1, 4), even_sides, even_sides), min_size=1, max_size=4)


@settings(max_examples=80)
@given(batches, st.sampled_from([4, 9, 48]), st.booleans(), st.sampled_from(list(TAPS)))
@example([(1, 2, 96), (1, 48, 48), (1, 180, 240)], 48, True, "bilinear")
@example([(1, 2, 2), (1, 96, 2), (1, 50, 34)], 48, False, "bilinear")
def test_taps_are_bit_equal_to_those_of_transformers(
    grids: Grids, side: int, align_corners: bool, mode: Any
) -> None:
    expected_indices, expected_weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor(grids), side, mode=mode, align_corners=align_corners, spatial_merge_size=2
    )
    indices, weights = interpolation(grids, (side, side), 2, align_corners, mode)
    assert (indices.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(indices, expected_indices.int())
    assert torch.equal(weights, expected_weights)


@settings(max_examples=60)
@given(sides, sides, st.sampled_from([(8, 8), (64, 64), (6, 11)]), st.sampled_from(list(TAPS)))
def test_a_resampled_table_is_that_of_interpolate(
    height: int, width: int, table: tuple[int, int], mode: Any
) -> None:
    values = torch.rand(*table, 3, generator=torch.Generator().manual_seed(height))
    result = resample(values.flatten(0, 1), *interpolation([(1, height, width)], table, 1, False, mode))
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

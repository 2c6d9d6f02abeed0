from __future__ import annotations

import numpy as np

from fxsplit_encoder.models.tiles import cut

from .processors import noise


def test_tiles_are_cut_row_by_row() -> None:
    image = noise(5, 4)
    pixels = np.asarray(image)
    tiles = [np.asarray(tile) for tile in cut(image, 2, 2)]
    expected = [pixels[y : y + 2, x : x + 2] for y in (0, 2) for x in (0, 2)]
    np.testing.assert_array_equal(tiles, expected)

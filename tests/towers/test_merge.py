from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.modules.blocks import merge
from fxsplit_encoder.towers.merge import merge_order


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
    order = merge_order(grids, side)
    assert order.dtype == torch.int64
    assert order.sort()[0].tolist() == list(range(len(rows)))
    assert torch.equal(
        merge(rows, order, side * side), torch.cat([torch.zeros(0, side * side, 1), *expected])
    )

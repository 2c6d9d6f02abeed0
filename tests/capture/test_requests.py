"""The number of real rows is written where it changes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.capture import RowCount


@given(st.lists(st.integers(0, 3)))
def test_it_is_written_where_it_changes(numbers: list[int]) -> None:
    count = RowCount(2, torch.device("cpu"))
    for before, rows in zip([2, *numbers], numbers, strict=False):
        version = count.tensor._version
        count.set(rows)
        assert count.tensor.item() == rows
        assert count.tensor._version - version == (before != rows)

"""The number of real rows is written where it changes, and is the same for all who share it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.capture import (
    CapturedForward,
    GraphPool,
    RowCount,
    StaticBuffer,
    StaticParameters,
    request_over,
)
from fxsplit_encoder.capture.segments import full_cu_seqlens
from fxsplit_encoder.compile import Runner


@given(st.lists(st.integers(0, 3)))
def test_it_is_written_where_it_changes(numbers: list[int]) -> None:
    count = RowCount(2, torch.device("cpu"))
    for before, rows in zip([2, *numbers], numbers, strict=False):
        version = count.tensor._version
        count.set(rows)
        assert count.tensor.item() == rows
        assert count.tensor._version - version == (before != rows)


def test_captures_for_one_segment_and_for_several_share_it() -> None:
    count = RowCount(8, torch.device("cpu"))
    buffers = {
        "x": StaticBuffer("x", torch.zeros(8)),
        "cu_seqlens": StaticBuffer("cu_seqlens", full_cu_seqlens(3, 8, 1), None),
    }

    def forward(tensors: Mapping[str, Tensor], runner: Runner) -> list[Tensor]:
        return [tensors["x"] * count.tensor]

    request = request_over(
        buffers,
        forward,
        parameters=StaticParameters(()),
        segment_inputs=["cu_seqlens"],
        rows=8,
        num_rows=count,
        can_break=False,
        frame_lengths="cu_seqlens",
    )
    assert request.one_segment is not None
    captures = []
    for each in (request, request.one_segment()):
        captured = CapturedForward(
            each.inputs,
            each.parameters,
            each.segment_inputs,
            each.rows,
            each.num_rows,
            "full",
            GraphPool(torch.device("cpu"), None),
        )
        captured.record(each.forward)
        captures.append(captured)
    several, one = captures
    for captured, lengths in ((several, [3, 2]), (one, [4]), (several, [3, 2]), (one, [4]), (one, [6])):
        rows = sum(lengths)
        boundaries = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        captured.load({"x": torch.ones(rows), "cu_seqlens": boundaries}, rows)
        assert captured.replay()[0].tolist() == [rows] * rows + [0] * (8 - rows)

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.capture.buffers import StaticBuffer
from fxsplit_encoder.capture.forward import CapturedForward
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.errors import ReplayError
from fxsplit_encoder.kernels.attention import varlen_attention

from .bodies import request_of

ROWS, BOUND = 8, 6


@pytest.fixture(params=["full", "breakable"])
def captured(request: Any) -> CapturedForward:
    """Attention of 8 rows with segments of at most 6, loaded with a batch of 5."""
    x = torch.randn(ROWS, 2, 4)
    cu_seqlens = torch.tensor([0, 2, ROWS, ROWS], dtype=torch.int32)
    buffers = [StaticBuffer("x", x), StaticBuffer("cu_seqlens", cu_seqlens)]

    def forward() -> list[Tensor]:
        return [(varlen_attention(x, x, x, cu_seqlens, BOUND, 0.5) + x)[::2]]

    made = CapturedForward(request_of(forward, ROWS, buffers), request.param, GraphPool(x.device))
    made.record()
    made.load({"x": torch.randn(5, 2, 4), "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)}, None)
    return made


def assert_refused(captured: CapturedForward, message: str) -> None:
    with pytest.raises(ReplayError, match=f"^capture rule {message}"):
        captured.replay(debug=True)


def test_a_replay_that_keeps_the_rules_passes(captured: CapturedForward) -> None:
    assert captured.segment_inputs == ("cu_seqlens",)
    (out,) = captured.replay(debug=True)
    assert out.shape == (4, 2, 4)
    captured.inputs.tensors["x"][4] = float("inf")  # a row of the batch's own
    captured.replay(debug=True)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([0, 4, 3, 5], "cu_seqlens: entry 2 falls from 4 to 3"),
        ([1, 2, 5, 5], "cu_seqlens: starts at 1"),
        ([0, 5, 9, 9], "cu_seqlens: ends at 9; the capture has 8 rows"),
        ([0, 7, 7, 7], "cu_seqlens: segment 0 has 7 rows; attention was captured for at most 6"),
    ],
)
def test_cumulative_lengths_are_checked(captured: CapturedForward, lengths: list[int], message: str) -> None:
    captured.inputs.tensors["cu_seqlens"].copy_(torch.tensor(lengths))
    assert_refused(captured, f"2: {message}")


def test_pad_rows_of_inputs_are_finite(captured: CapturedForward) -> None:
    captured.inputs.tensors["x"][6, 1, 2] = float("nan")
    assert_refused(captured, "1: x: pad row 6 is not finite; the batch ends at row 5")


def test_pad_rows_of_outputs_are_finite(captured: CapturedForward, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = captured.capture.replay

    def spoil() -> None:
        replay()
        captured.outputs[0][3, 0, 0] = float("inf")

    monkeypatch.setattr(captured.capture, "replay", spoil)
    assert_refused(captured, "1: output 0: pad row 3 is not finite; the batch ends at row 3")


def test_ascend_16794_inputs_and_outputs_stay_where_they_are(captured: CapturedForward) -> None:
    tensor = captured.outputs[0]
    kept = tensor.detach()
    tensor.set_(tensor.clone())
    assert_refused(captured, "6: output 0: its captured buffer moved from 0x")
    tensor.set_(kept)
    captured.replay(debug=True)
    captured.inputs.tensors["x"].set_(torch.zeros(ROWS, 2, 4))
    assert_refused(captured, "6: x: its captured buffer moved")

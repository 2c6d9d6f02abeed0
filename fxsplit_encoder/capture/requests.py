"""What a forward has to give to be captured at one size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.capture.breakable import DEFAULT_SPLITTING_OPS
from fxsplit_encoder.capture.buffers import StaticBuffer, StaticInputs
from fxsplit_encoder.capture.parameters import StaticParameters
from fxsplit_encoder.capture.row_count import RowCount
from fxsplit_encoder.compile import Runner


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """One size of a forward, ready to be captured."""

    inputs: StaticInputs
    parameters: StaticParameters
    segment_inputs: Sequence[str]
    rows: int
    num_rows: RowCount | None
    """Where the forward's masks read the number of real rows."""
    forward: Callable[[Runner], Sequence[Any]]
    """Runs over the tensors of `inputs`."""
    can_break: bool
    """Whether the forward has splitting ops, so that `piecewise` differs from `full`."""
    one_segment: Callable[[], CaptureRequest] | None = None
    """Makes the same request for batches of one segment. Empty segments cost attention
    (benchmarks/attention.py).
    """
    compiled: bool = True
    """Whether the forward is a program, see `CapturedForward`."""
    splitting_ops: Sequence[str] = DEFAULT_SPLITTING_OPS
    """Where a forward that is not compiled breaks."""

    @property
    def modes(self) -> list[str]:
        """The modes in which it can be captured."""
        if not self.compiled:
            return ["full", "breakable"]
        return ["full", "piecewise"] if self.can_break else ["full"]


def request_over(
    buffers: Mapping[str, StaticBuffer],
    forward: Callable[[Mapping[str, Tensor], Runner], Sequence[Any]],
    *,
    parameters: StaticParameters,
    segment_inputs: Sequence[str],
    rows: int,
    num_rows: RowCount | None,
    can_break: bool,
    frame_lengths: str | None,
) -> CaptureRequest:
    """The request of a compiled forward over static buffers, and the one for a single segment beside it.

    Args:
        buffers: the static inputs by name.
        forward: runs over the tensors of some buffers.
        frame_lengths: the name of the cumulative lengths that a batch of one segment has only two of; None:
            there are none.
    """

    def over(own: Mapping[str, StaticBuffer], narrow: Callable[[], CaptureRequest] | None) -> CaptureRequest:
        tensors = {name: buffer.tensor for name, buffer in own.items()}
        return CaptureRequest(
            StaticInputs(own.values()),
            parameters,
            segment_inputs,
            rows,
            num_rows,
            lambda runner: forward(tensors, runner),
            can_break,
            narrow,
        )

    def one_segment() -> CaptureRequest:
        assert frame_lengths is not None
        device = buffers[frame_lengths].tensor.device
        lengths = torch.tensor([0, rows], dtype=torch.int32, device=device)
        return over({**buffers, frame_lengths: StaticBuffer(frame_lengths, lengths, None)}, None)

    several = frame_lengths is not None and buffers[frame_lengths].tensor.shape[0] > 2
    return over(buffers, one_segment if several else None)

"""From a callable over static buffers to something that replays. Knows nothing of models."""

from fxsplit_encoder.capture.breakable import (
    BreakableCUDAGraphCapture,
    SegmentedCapture,
    active_capture,
    eager_break_during_capture,
)
from fxsplit_encoder.capture.buffers import HandedOut, SharedBuffers, StaticBuffer
from fxsplit_encoder.capture.forward import CapturedForward, CaptureRequest, ProgramBody, RowCount, measure_ms
from fxsplit_encoder.capture.inputs import StaticInputs, pad_cu_seqlens, segment_capacity
from fxsplit_encoder.capture.ladder import BudgetLadder, KnownBudget, MeasuredCosts
from fxsplit_encoder.capture.parameters import StaticParameters
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.capture.wrapper import BreakableCUDAGraphWrapper

__all__ = [
    "BreakableCUDAGraphCapture",
    "BreakableCUDAGraphWrapper",
    "BudgetLadder",
    "CaptureRequest",
    "CapturedForward",
    "GraphPool",
    "HandedOut",
    "KnownBudget",
    "MeasuredCosts",
    "ProgramBody",
    "RowCount",
    "SegmentedCapture",
    "SharedBuffers",
    "StaticBuffer",
    "StaticInputs",
    "StaticParameters",
    "active_capture",
    "eager_break_during_capture",
    "measure_ms",
    "pad_cu_seqlens",
    "segment_capacity",
]

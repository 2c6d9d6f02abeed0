"""From a callable over static buffers to something that replays. Knows nothing of models."""

from fxsplit_encoder.capture.breakable import BreakableCUDAGraphCapture, eager_break_during_capture
from fxsplit_encoder.capture.buffers import SharedBuffers, StaticBuffer
from fxsplit_encoder.capture.forward import CapturedForward, CaptureRequest, ProgramBody, RowCount, measure_ms
from fxsplit_encoder.capture.inputs import StaticInputs, segment_capacity
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
    "KnownBudget",
    "MeasuredCosts",
    "ProgramBody",
    "RowCount",
    "SharedBuffers",
    "StaticBuffer",
    "StaticInputs",
    "StaticParameters",
    "eager_break_during_capture",
    "measure_ms",
    "segment_capacity",
]

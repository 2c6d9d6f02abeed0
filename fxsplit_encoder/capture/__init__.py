"""From a callable over static buffers to something that replays. Knows nothing of models."""

from fxsplit_encoder.capture.budgets import generate_budgets, smallest_fitting
from fxsplit_encoder.capture.buffers import (
    SharedBuffers,
    StaticBuffer,
    StaticInputs,
)
from fxsplit_encoder.capture.exact_shapes import ExactShapes
from fxsplit_encoder.capture.forward import CapturedForward, measure_ms
from fxsplit_encoder.capture.ladder import BudgetLadder
from fxsplit_encoder.capture.parameters import StaticParameters
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.capture.reasons import MissReason
from fxsplit_encoder.capture.requests import CaptureRequest, request_over
from fxsplit_encoder.capture.segmented import SegmentedCapture
from fxsplit_encoder.capture.segments import pad_cu_seqlens, segment_capacity

__all__ = [
    "BudgetLadder",
    "CaptureRequest",
    "CapturedForward",
    "ExactShapes",
    "GraphPool",
    "MissReason",
    "SegmentedCapture",
    "SharedBuffers",
    "StaticBuffer",
    "StaticInputs",
    "StaticParameters",
    "generate_budgets",
    "measure_ms",
    "pad_cu_seqlens",
    "request_over",
    "segment_capacity",
    "smallest_fitting",
]

"""Run a program with its captures, for the manager and for torch.compile."""

from fxsplit_encoder.runtime.captured_program import CapturableForward, CapturedProgram, Choosers
from fxsplit_encoder.runtime.measure import KnownCosts, MeasuredForward, measure_forward, run_timed
from fxsplit_encoder.runtime.memory_limit import CaptureSet
from fxsplit_encoder.runtime.requests import (
    CaptureScope,
    FreshInputs,
    WeightChecks,
    request_of_module,
    request_of_program,
)
from fxsplit_encoder.runtime.unpadded import UnpaddedCaptures, rows_of

__all__ = [
    "CapturableForward",
    "CaptureScope",
    "CaptureSet",
    "CapturedProgram",
    "Choosers",
    "FreshInputs",
    "KnownCosts",
    "MeasuredForward",
    "UnpaddedCaptures",
    "WeightChecks",
    "measure_forward",
    "request_of_module",
    "request_of_program",
    "rows_of",
    "run_timed",
]

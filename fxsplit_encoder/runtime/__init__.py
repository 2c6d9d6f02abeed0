"""A program with its captures: what the manager and torch.compile both run."""

from fxsplit_encoder.runtime.captured_program import (
    CapturableForward,
    CapturedProgram,
    Choosers,
    UnpaddedReplays,
)
from fxsplit_encoder.runtime.measure import KnownCosts, MeasuredForward, measuring_forward, timed_runs
from fxsplit_encoder.runtime.memory_limit import CaptureSet
from fxsplit_encoder.runtime.requests import CaptureScope, FreshInputs, request_of_module, request_of_program

__all__ = [
    "CapturableForward",
    "CaptureScope",
    "CaptureSet",
    "CapturedProgram",
    "Choosers",
    "FreshInputs",
    "KnownCosts",
    "MeasuredForward",
    "UnpaddedReplays",
    "measuring_forward",
    "request_of_module",
    "request_of_program",
    "timed_runs",
]

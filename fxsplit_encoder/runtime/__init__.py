"""A program with its captures: what the manager and torch.compile both run."""

from fxsplit_encoder.runtime.captured_program import CapturableForward, CapturedProgram
from fxsplit_encoder.runtime.choosers import Choosers
from fxsplit_encoder.runtime.measure import KnownCosts, MeasuredForward, measuring_forward, timed_runs
from fxsplit_encoder.runtime.memory_limit import CaptureSet
from fxsplit_encoder.runtime.requests import FreshInputs, request_of_module, request_of_program
from fxsplit_encoder.runtime.scope import CaptureScope
from fxsplit_encoder.runtime.unpadded import UnpaddedReplays

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

"""Which budgets to capture, found offline from a trace of requests. Needs no torch."""

from fxsplit_encoder.tuning.costs import BatchCosts, MemoryModel, RisingCurve, read_costs
from fxsplit_encoder.tuning.search import LadderLimits
from fxsplit_encoder.tuning.trace import Request, read_trace
from fxsplit_encoder.tuning.tune import Tuning, tune_budgets, tune_trace

__all__ = [
    "BatchCosts",
    "LadderLimits",
    "MemoryModel",
    "Request",
    "RisingCurve",
    "Tuning",
    "read_costs",
    "read_trace",
    "tune_budgets",
    "tune_trace",
]

"""Which budgets to capture, found offline from a trace of requests. Needs no torch."""

from fxsplit_encoder.tuning.search import BatchCosts, LadderLimits
from fxsplit_encoder.tuning.trace import MeasuredCosts, read_run, read_trace
from fxsplit_encoder.tuning.tune import Tuning, tune_trace

__all__ = ["BatchCosts", "LadderLimits", "MeasuredCosts", "Tuning", "read_run", "read_trace", "tune_trace"]

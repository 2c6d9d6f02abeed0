"""What operations with several kernels share: classes of calls, kernels, their comparison by accuracy and
time, the choice, what users pin, and what is kept of it on disk.

`attention` and `products` are such operations. Nothing here knows which there are.
"""

from fxsplit_encoder.kernels.base import CallShape, CudaKernel, Kernel, capability, find, round_up, works
from fxsplit_encoder.kernels.cache import MeasurementCache, cache_directory, describe_environment
from fxsplit_encoder.kernels.choice import (
    Chooser,
    KernelMeasurements,
    Unmeasured,
    choosing,
    collecting,
    is_measuring,
    measuring,
)
from fxsplit_encoder.kernels.measure import (
    MOST_CALLS_TIMED,
    Example,
    Measured,
    Meter,
    Part,
    TimeSpent,
    microseconds,
    spoil_memory,
    timing_without_graphs,
)
from fxsplit_encoder.kernels.pins import AUTO, Pin, PinGrammar
from fxsplit_encoder.kernels.report import ClassReport, KernelReport, OperationReport, describe, failing

__all__ = [
    "AUTO",
    "MOST_CALLS_TIMED",
    "CallShape",
    "Chooser",
    "ClassReport",
    "CudaKernel",
    "Example",
    "Kernel",
    "KernelMeasurements",
    "KernelReport",
    "Measured",
    "MeasurementCache",
    "Meter",
    "OperationReport",
    "Part",
    "Pin",
    "PinGrammar",
    "TimeSpent",
    "Unmeasured",
    "cache_directory",
    "capability",
    "choosing",
    "collecting",
    "describe",
    "describe_environment",
    "failing",
    "find",
    "is_measuring",
    "measuring",
    "microseconds",
    "round_up",
    "spoil_memory",
    "timing_without_graphs",
    "works",
]

"""What operations with several kernels (`attention`, `products`) share: classes of calls, their comparison by
accuracy and time, the choice, what users pin, and what is kept of it on disk.
"""

from fxsplit_encoder.kernels.choice import (
    AUTO,
    Chooser,
    ClassReport,
    KernelMeasurements,
    KernelReport,
    OperationReport,
    Pin,
    PinGrammar,
    Unmeasured,
    choosing,
    collecting,
    describe,
    failing,
    is_measuring,
    measuring,
)
from fxsplit_encoder.kernels.kernel import CallShape, CudaKernel, Kernel, capability, find, round_up, works
from fxsplit_encoder.kernels.meter import (
    MOST_CALLS_TIMED,
    Example,
    Measured,
    Meter,
    TimeSpent,
    microseconds,
    poison_memory,
    timing_without_graphs,
)
from fxsplit_encoder.kernels.store import KernelStore, cache_directory, describe_environment

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
    "KernelStore",
    "Measured",
    "Meter",
    "OperationReport",
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
    "poison_memory",
    "round_up",
    "timing_without_graphs",
    "works",
]

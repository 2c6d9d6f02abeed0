"""What operations with several kernels (`attention`, `products`) share: classes of calls, their comparison by
accuracy and time, the choice, what users pin, and what is kept of it on disk.
"""

from fxsplit_encoder.kernels.choice import (
    Chooser,
    KernelMeasurements,
    OperationReport,
    Unmeasured,
    choosing,
    collecting,
    describe,
    failing,
    is_measuring,
    measuring,
)
from fxsplit_encoder.kernels.meter import Measured, TimeSpent, timing_without_graphs
from fxsplit_encoder.kernels.store import describe_environment

__all__ = [
    "Chooser",
    "KernelMeasurements",
    "Measured",
    "OperationReport",
    "TimeSpent",
    "Unmeasured",
    "choosing",
    "collecting",
    "describe",
    "describe_environment",
    "failing",
    "is_measuring",
    "measuring",
    "timing_without_graphs",
]

"""Fast vision encoders: graphs split at attention, CUDA graphs by token budget, and a manager that packs.

What needs torch is imported when it is used first: that takes seconds, for which a command's help need not
wait.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fxsplit_encoder.config import EncoderConfig, PathConfig
from fxsplit_encoder.errors import (
    CaptureError,
    CaptureMemoryError,
    CompileError,
    ConfigError,
    FxSplitError,
    InputError,
    MediaError,
    MissingExtraError,
    RankError,
    ReplayError,
    TowerChangedError,
    UnsupportedTowerError,
    WeightsLayoutError,
    WeightsMovedError,
)
from fxsplit_encoder.planning.limits import generate_budgets
from fxsplit_encoder.planning.plan import MissReason, Plan
from fxsplit_encoder.protocol import (
    BudgetGraphMetadata,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    SupportsEncoderCudaGraph,
    scatter_output_slices,
)
from fxsplit_encoder.version import VERSION

if TYPE_CHECKING:
    from fxsplit_encoder.capture.breakable import BreakableCUDAGraphCapture, eager_break_during_capture
    from fxsplit_encoder.capture.pool import GraphPool
    from fxsplit_encoder.capture.wrapper import BreakableCUDAGraphWrapper
    from fxsplit_encoder.hugging_face import accelerate, restore
    from fxsplit_encoder.integrations.serving import refresh, stats, warmup
    from fxsplit_encoder.manager import EncoderCudaGraphManager, ManagerStats
    from fxsplit_encoder.towers import DenseTowerSpec, PackedTower, supported_towers, wrap

__version__ = VERSION

__all__ = [
    "BreakableCUDAGraphCapture",
    "BreakableCUDAGraphWrapper",
    "BudgetGraphMetadata",
    "CaptureError",
    "CaptureMemoryError",
    "CompileError",
    "ConfigError",
    "DenseTowerSpec",
    "EncoderConfig",
    "EncoderCudaGraphCaptureInputs",
    "EncoderCudaGraphConfig",
    "EncoderCudaGraphManager",
    "EncoderCudaGraphPathConfig",
    "EncoderCudaGraphReplayBuffers",
    "EncoderItemSpec",
    "FxSplitError",
    "GraphPool",
    "InputError",
    "ManagerStats",
    "MediaError",
    "MissReason",
    "MissingExtraError",
    "PackedTower",
    "PathConfig",
    "Plan",
    "RankError",
    "ReplayError",
    "SupportsEncoderCudaGraph",
    "TowerChangedError",
    "UnsupportedTowerError",
    "WeightsLayoutError",
    "WeightsMovedError",
    "accelerate",
    "eager_break_during_capture",
    "generate_budgets",
    "refresh",
    "restore",
    "scatter_output_slices",
    "stats",
    "supported_towers",
    "warmup",
    "wrap",
]

_WITH_TORCH = {
    **dict.fromkeys(("accelerate", "restore"), "hugging_face"),
    **dict.fromkeys(("refresh", "stats", "warmup"), "integrations.serving"),
    **dict.fromkeys(("BreakableCUDAGraphCapture", "eager_break_during_capture"), "capture.breakable"),
    "BreakableCUDAGraphWrapper": "capture.wrapper",
    "GraphPool": "capture.pool",
    **dict.fromkeys(("EncoderCudaGraphManager", "ManagerStats"), "manager"),
    **dict.fromkeys(("DenseTowerSpec", "PackedTower", "supported_towers", "wrap"), "towers"),
}
"""The modules of names that are imported when they are used."""


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WITH_TORCH})

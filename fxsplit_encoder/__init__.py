"""Fast vision encoders: graphs split at attention, CUDA graphs by token budget, and a manager that packs."""

from fxsplit_encoder.capture import (
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    GraphPool,
    eager_break_during_capture,
)
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
    UnsupportedTowerError,
    WeightsLayoutError,
    WeightsMovedError,
)
from fxsplit_encoder.integrations import accelerate, restore, stats, warmup
from fxsplit_encoder.manager import EncoderCudaGraphManager, ManagerStats
from fxsplit_encoder.planning import MissReason, Plan, generate_budgets
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
from fxsplit_encoder.towers import DenseTowerSpec, PackedTower, supported_towers, wrap
from fxsplit_encoder.version import VERSION

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
    "UnsupportedTowerError",
    "WeightsLayoutError",
    "WeightsMovedError",
    "accelerate",
    "eager_break_during_capture",
    "generate_budgets",
    "restore",
    "scatter_output_slices",
    "stats",
    "supported_towers",
    "warmup",
    "wrap",
]

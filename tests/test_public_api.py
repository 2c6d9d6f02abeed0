import fxsplit_encoder as fx

NAMES = [
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


def test_the_public_names_are_these() -> None:
    assert fx.__all__ == NAMES == sorted(NAMES)
    assert all(getattr(fx, name).__doc__ for name in NAMES)

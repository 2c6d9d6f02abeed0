"""Adapters between Hugging Face towers and the manager's protocol: a file a way of cutting images."""

from fxsplit_encoder.towers.packed import PackedTower
from fxsplit_encoder.towers.registry import DenseTowerSpec, supported_towers, wrap

__all__ = ["DenseTowerSpec", "PackedTower", "supported_towers", "wrap"]

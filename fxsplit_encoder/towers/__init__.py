"""Adapters: one file a model family, between a Hugging Face tower and the manager's protocol."""

from fxsplit_encoder.towers.packed import PackedTower
from fxsplit_encoder.towers.registry import DenseTowerSpec, supported_towers, wrap

__all__ = ["DenseTowerSpec", "PackedTower", "supported_towers", "wrap"]

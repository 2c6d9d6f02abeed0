"""Qwen3.5's vision tower (dense and mixture-of-experts models share it): Qwen3-VL's without deepstack."""

from __future__ import annotations

from fxsplit_encoder.towers.packed import PackedTower
from fxsplit_encoder.towers.qwen3_vl import Qwen3VLTower


class Qwen35Tower(Qwen3VLTower):
    """Wraps `Qwen3_5VisionModel` and `Qwen3_5MoeVisionModel`."""

    packed_output = PackedTower.packed_output

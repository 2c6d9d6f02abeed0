"""Managers of towers that tests pass, with limits that most of them share."""

from __future__ import annotations

from typing import Any

import fxsplit_encoder as fx
from fxsplit_encoder.manager.generation import Generation
from fxsplit_encoder.manager.tower import TowerSpec

SETTINGS: dict[str, Any] = {
    "mode": "full",
    "token_budgets": (4, 8, 16),
    "max_items_per_batch": 4,
    "debug": True,
}


def manager_of(tower: Any, **settings: Any) -> fx.EncoderCudaGraphManager:
    return fx.EncoderCudaGraphManager(tower, fx.EncoderConfig(**{**SETTINGS, **settings}), log_interval=0)


def captured(tower: Any, **settings: Any) -> fx.EncoderCudaGraphManager:
    manager = manager_of(tower, **settings)
    manager.capture()
    return manager


def captured_budgets(manager: fx.EncoderCudaGraphManager) -> dict[str, list[int]]:
    return {path: sorted(graphs) for path, graphs in manager.budget_graphs.items()}


def generation_of(manager: fx.EncoderCudaGraphManager) -> Generation:
    """Nothing captured yet, of the manager's tower and settings."""
    spec = TowerSpec(manager.tower, manager.model_config, manager.limits, manager.dtype)
    return Generation(spec, manager.config, manager.pool, manager.statistics)

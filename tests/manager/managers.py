"""Managers of towers that tests pass, with limits that most of them share."""

from __future__ import annotations

from typing import Any

import fxsplit_encoder as fx

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

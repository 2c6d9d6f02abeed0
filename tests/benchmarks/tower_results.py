"""Results as `towers.py` stores them."""

from __future__ import annotations

from typing import Any

from .conftest import ENVIRONMENT


def case(name: str, eager: float, ours: float) -> dict[str, Any]:
    errors = {"rms error": 1.01, "max error": 1.2}
    sizes = [1] if name != "batch of 8" else [1, 2]
    times = {"eager ms": eager, "ours ms": ours, "eager / ours": eager / ours}
    return {"case": name, "sizes": sizes, **times, "slower than eager": ours > 1.05 * eager, **errors}


def measured(*cases: dict[str, Any]) -> dict[str, Any]:
    seconds = {"build": 1.0, "references": 2.0, "compile": 10.4, "capture": 2.6, "cases": 3.0}
    pieces = {"pieces": 4, "cached pieces": 3}
    return {"seconds": seconds, **pieces, "capture bytes": 2**30, "cases": list(cases)}


def result(**models: Any) -> dict[str, Any]:
    return {**ENVIRONMENT, "models": models}

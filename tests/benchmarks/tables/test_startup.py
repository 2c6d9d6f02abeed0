from __future__ import annotations

from typing import Any

from tables.startup import marked

from ..conftest import ENVIRONMENT
from .cells import cells


def start(trace: float, cached: int) -> dict[str, Any]:
    seconds = {"import": 2.0, "trace": trace, "tower": 9.0, "total": 2.0 + trace}
    return {"seconds": seconds, "cached": cached, "distinct": 4, "captured": 16}


def test_a_second_start_stands_below_the_cold_one() -> None:
    starts = {"cold": start(20.0, 0), "second": start(5.0, 3)}
    text = marked({**ENVIRONMENT, "tower": "Qwen3-VL", "starts": starts, "memory ratio": 1.25})
    header, cold, second = cells(text)
    assert header == ["start", "import", "trace", "total"], "making the tower is no part of a start"
    assert (cold, second) == (["cold", "2.00", "20.0", "22.0"], ["second", "2.00", "5.00", "7.00"])
    assert "3 of 4 distinct pieces came from the cache the second time" in text
    assert "16 budgets hold 1.25 times the memory" in text
    assert "Qwen3-VL, torch 2.11" in text

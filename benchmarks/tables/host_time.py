"""The table of `host_time.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from environment import in_words

from tables.layout import tabulated


def rows(microseconds: Mapping[str, float], fmt: str = "pipe") -> str:
    """What keeps the CPU, in microseconds."""
    return tabulated(["host", "microseconds"], [*microseconds.items()], fmt)


def marked(stored: Mapping[str, Any]) -> str:
    return f"{rows(stored['microseconds'])}\n\n{in_words(stored, 'Qwen3-VL-8B vision, 27 blocks, bf16')}."

"""The table of `biased_attention.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from environment import in_words

from tables.layout import tabulated


def table(rows: Sequence[Mapping[str, Any]], fmt: str = "pipe") -> str:
    """Milliseconds and error of every way, a line for each grid; what failed is a dash."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    grids = list(dict.fromkeys(row["grid"] for row in rows))
    by_cell = {(row["grid"], row["way"]): row for row in rows}

    def shown(grid: str, way: str) -> str | None:
        row = by_cell.get((grid, way), {})
        return f"{row['ms']:#.3g} ({row['error']:.2g})" if "ms" in row else None

    lines = [[grid, *(shown(grid, way) for way in ways)] for grid in grids]
    return tabulated(["grid", *ways], lines, fmt)


def marked(stored: Mapping[str, Any]) -> str:
    return f"{table(stored['rows'])}\n\nMilliseconds (error). {in_words(stored, '12 heads of 64, bf16')}."

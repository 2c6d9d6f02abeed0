"""The tables of `attention.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from environment import in_words

from tables.layout import by_columns, tabulated

Row = Mapping[str, Any]
_COLUMNS = ("segments", "tokens", "kernel", "first ms", "known", "host", "captured", "chosen", "error")


def all_rows(rows: Sequence[Row], fmt: str = "simple") -> str:
    """Every number of every kernel."""
    return by_columns({name: name for name in _COLUMNS}, rows, fmt)


def kernels(rows: Sequence[Row]) -> str:
    """Microseconds at known lengths and in a graph, "known / captured", a column for each kernel."""
    names = list(dict.fromkeys(row["kernel"] for row in rows))
    by_segments: dict[str, dict[str, str]] = {}
    for row in rows:
        by_segments.setdefault(row["segments"], {})[row["kernel"]] = _both(row)
    lines = [[segments, *map(cells.get, names)] for segments, cells in by_segments.items()]
    return tabulated(["segments", *(f"`{name}`" for name in names)], lines)


def _both(row: Row) -> str:
    """What was chosen is bold; what failed says so."""
    missing = "failed" if "error" in row else "-"
    cells, chosen = [], row["chosen"].split(", ")
    for where in ("known", "captured"):
        value = row.get(where)
        text = missing if value is None else f"{value:.1f}"
        text = f"**{text}**" if where in chosen else text
        cells.append(f"{text}†" if where == "known" and "batch" in chosen else text)
    return " / ".join(cells)


def marked(stored: Mapping[str, Any]) -> str:
    where = in_words(stored, "bf16", "16 heads of 72")
    caption = "Microseconds, known lengths / in a graph; bold: what is chosen; †: for a batch in a graph."
    return f"{kernels(stored['rows'])}\n\n{caption} {where}."

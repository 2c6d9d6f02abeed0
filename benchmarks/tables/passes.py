"""The tables of `passes.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from environment import in_words

from tables.layout import by_columns, tabulated

Row = Mapping[str, Any]
FP8 = "fp8 with its rows"


def replays(rows: Sequence[Row], fmt: str = "pipe") -> str:
    """Milliseconds of a replay by number of patches, a row for each candidate."""
    sizes = dict.fromkeys(name for row in rows for name in row if name.isdecimal())
    shown = ["candidate", *sizes, "error", "derived MiB", *_if_any("failed", rows)]
    return by_columns({name: name for name in shown}, rows, fmt)


def products(rows: Sequence[Row], fmt: str = "pipe") -> str:
    """Every number of every way to multiply."""
    shown = ["layer", "rows", "way", "us", "TFLOP/s", "GB/s", *_if_any("failed", rows)]
    return by_columns({name: name for name in shown}, rows, fmt)


def fastest_products(rows: Sequence[Row]) -> str:
    """Microseconds of the default way, of the fastest in bf16, and of fp8, by layer and rows."""
    by_layer: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        ways = by_layer.setdefault((row["layer"], row["rows"]), {})
        if "us" in row:
            ways[row["way"]] = row["us"]
    lines = []
    for layer, ways in by_layer.items():
        # Where an activation follows, the ways that compute it too are compared.
        default = ways.get("default, then gelu", ways.get("default"))
        whole = _same_work(ways, gelu="default, then gelu" in ways)
        fastest = min(whole, key=whole.__getitem__, default=None)
        lines.append([*layer, default, fastest, whole.get(fastest or ""), ways.get(FP8)])
    return tabulated(["layer", "rows", "default", "fastest in bf16", "its time", FP8], lines)


def _same_work(ways: Mapping[str, float], gelu: bool) -> dict[str, float]:
    return {way: us for way, us in ways.items() if "fp8" not in way and ("gelu" in way) == gelu}


def _if_any(name: str, rows: Iterable[Row]) -> list[str]:
    return [name] if any(name in row for row in rows) else []


def marked_replays(stored: Mapping[str, Any]) -> str | None:
    if not stored["replays"]:
        return None
    return f"{replays(stored['replays'])}\n\nMilliseconds of one full graph replay. {in_words(stored)}."


def marked_products(stored: Mapping[str, Any]) -> str | None:
    if not stored["products"]:
        return None
    return f"{fastest_products(stored['products'])}\n\nMicroseconds. {in_words(stored)}."

"""The table of `mixed_requests.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from environment import in_words

from tables.layout import by_columns

_TITLES = {
    "HF eager": "Hugging Face eager",
    "power-of-two graphs": "our compiled program, one full graph a power of two, greedy packing",
    "ours": "`manager.execute`, default settings",
}
_COLUMNS = {
    "": "title",
    "mean": "mean",
    "p50": "p50",
    "p99": "p99",
    "slowest request against eager": "slowest against eager",
}


def requests(stored: Mapping[str, Any]) -> str:
    """Milliseconds a request, by contender."""
    rows = [{**row, "title": _TITLES[row["contender"]]} for row in stored["summary"]]
    where = in_words(stored, stored["tower"])
    return f"{by_columns(_COLUMNS, rows)}\n\nMilliseconds, {stored['requests']} requests. {where}."

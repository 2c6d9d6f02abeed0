"""The table of `startup.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from environment import in_words

from tables.layout import tabulated


def phases(stored: Mapping[str, Any], fmt: str = "pipe") -> str:
    """Seconds of every phase of a cold start and of a second one."""
    starts = stored["starts"]
    names = [name for name in starts["cold"]["seconds"] if name != "tower"]
    lines = [[start, *(made["seconds"][name] for name in names)] for start, made in starts.items()]
    return tabulated(["start", *names], lines, fmt)


def sentences(stored: Mapping[str, Any]) -> str:
    """What came from the cache, and what the captures hold."""
    second, ratio = stored["starts"]["second"], stored["memory ratio"]
    return (
        f"{second['cached']} of {second['distinct']} distinct pieces came from the cache the second time; "
        f"{second['captured']} budgets hold {ratio:.2f} times the memory of the largest alone."
    )


def marked(stored: Mapping[str, Any]) -> str:
    where = in_words(stored, stored["tower"])
    return f"{phases(stored)}\n\nSeconds. {sentences(stored)} {where}."

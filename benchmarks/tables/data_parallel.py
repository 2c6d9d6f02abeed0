"""The table of `data_parallel.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from environment import in_words

from tables.layout import by_columns

_COLUMNS = {"GPUs": "ranks", "`execute`, ms": "execute", "times as fast as one": "speed-up"}


def ranks(stored: Mapping[str, Any]) -> str:
    """Milliseconds of a request, by the number of GPUs."""
    return f"{by_columns(_COLUMNS, stored['rows'])}\n\n{in_words(stored, stored['tower'])}."

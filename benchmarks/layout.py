"""Tables in Markdown, of figures with three digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate


def formatted(headers: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A table; None is a dash, and columns of numbers are aligned to the right."""
    numeric = [all(isinstance(line[i], int | float | None) for line in lines) for i in range(len(headers))]
    return tabulate(
        [[shown(value) for value in line] for line in lines],
        headers,
        tablefmt="pipe",
        missingval="-",
        disable_numparse=True,
        colalign=["right" if each else "left" for each in numeric] if lines else None,
    )


def by_columns(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of some values of every row: headers, and the names of the values below them."""
    return formatted(list(columns), [[row.get(name) for name in columns.values()] for row in rows])


def shown(value: Any) -> Any:
    """Three digits, and all digits of what is larger."""
    if not isinstance(value, float):
        return value
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"

"""All measures, and the table of them."""

from __future__ import annotations

from tabulate import tabulate

from house.calls import measure_calls
from house.imports import measure_imports
from house.measure import Measure
from house.private import measure_private
from house.sources import measure_sizes, read_sources


def measure_all() -> list[Measure]:
    """Every measure, in the order of the table."""
    sources = read_sources()
    return [*measure_sizes(sources), *measure_imports(), *measure_calls(), *measure_private(sources)]


def table(measures: list[Measure]) -> str:
    """The measures as text, a row each."""
    return tabulate(
        [measure.row() for measure in measures],
        headers=("measure", "value", "goal", "ok", ""),
        disable_numparse=True,
        colalign=("left", "right", "left", "left", "left"),
    )

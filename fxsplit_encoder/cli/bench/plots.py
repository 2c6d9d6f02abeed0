"""The measured times as bars: in the terminal, and as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from fxsplit_encoder.cli.bench.result import Measured

_COLORS = {"eager": "#8a94a3", "graph": "#c9483f", "reduce-overhead": "#f0a63a", "ours": "#2f6fdb"}
_LEAST_WIDTH, _MOST_WIDTH = 10, 50
_NUMBER_WIDTH = 13
_INCHES_A_BATCH = 0.9


def print_bars(rows: Sequence[Measured], titles: Mapping[str, str]) -> None:
    """A bar for every way of every batch, as long as its time, on stdout."""
    console = Console(highlight=False, markup=False)
    longest = max((ms for row in rows for ms in row.ms.values()), default=0.0)
    beside = max(len(row.item) for row in rows) + max(map(len, titles.values())) + _NUMBER_WIDTH
    width = max(_LEAST_WIDTH, min(_MOST_WIDTH, console.width - beside))
    table = Table.grid(padding=(0, 1))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        for place, name in enumerate(each for each in titles if each in row.ms):
            bar = Bar(longest, 0, row.ms[name], width=width, color=_COLORS[name])
            table.add_row("" if place else row.item, titles[name], bar, f"{row.ms[name]:.2f}")
        if number < len(rows) - 1:
            table.add_row()
    console.print(table)


def save_png(path: Path, rows: Sequence[Measured], titles: Mapping[str, str], title: str) -> None:
    """Groups of horizontal bars with their milliseconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + _INCHES_A_BATCH * len(rows)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / max(1, len(titles))
    for place, (name, label) in enumerate(titles.items()):
        at = [index + (place - (len(titles) - 1) / 2) * height for index in range(len(rows))]
        bars = axes.barh(
            at, [row.ms.get(name, 0.0) for row in rows], height, label=label, color=_COLORS[name]
        )
        labels = [f" {row.ms[name]:.2f}" if name in row.ms else "" for row in rows]
        axes.bar_label(bars, labels=labels, fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row.item}\n{row.size}".strip() for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("milliseconds, less is better")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)

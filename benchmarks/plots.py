"""Latency, and its ratio to the arithmetic floor, against patches: one line a contender."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from our_contenders import CONTENDERS
from records import FLOOR, Records
from tables.encoder import OURS, hardware, title

_HEADING_WIDTH = 130
_MORE_COLOURS = ("teal", "gold", "navy", "tan", "indigo", "lime", "crimson", "dimgray")


def plot(records: Records, folder: Path) -> list[Path]:
    """Draws every tower as PNG and SVG into a folder; returns the files.

    Lines join single images. Requests of several items are open circles: their attention is cut into
    segments, so patches alone do not tell their cost.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib
    import matplotlib.figure

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for tower in records.towers:
        if not records.contenders(tower):
            continue
        figure = matplotlib.figure.Figure(figsize=(11, 6.5), layout="constrained")
        latency, ratio = figure.subplots(1, 2)
        for contender in (FLOOR, *CONTENDERS):
            _draw(latency, records, tower, contender, over_floor=False)
            if contender != FLOOR:
                _draw(ratio, records, tower, contender, over_floor=True)
        for axes, label in ((latency, "median wall time, ms"), (ratio, "times the arithmetic floor")):
            axes.set(xscale="log", yscale="log", xlabel="patches a request", ylabel=label)
            axes.grid(visible=True, which="both", alpha=0.25)
        handles = latency.get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=3, fontsize="small")
        heading = textwrap.fill(f"{tower}: {hardware(records, tower)}", _HEADING_WIDTH)
        figure.suptitle(heading, fontsize="small", x=0.01, ha="left")
        for suffix in (".png", ".svg"):
            files.append(folder / f"encoder_{tower}{suffix}")
            # The same file from the same results, its words as text.
            with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": tower}):
                figure.savefig(files[-1], dpi=150, metadata={"Date": None} if suffix == ".svg" else None)
    return files


def _draw(axes: Any, records: Records, tower: str, contender: str, over_floor: bool) -> None:
    series, others = [], []
    for workload in records.workloads(tower):
        value = (
            records.ratio(tower, workload, contender, FLOOR)
            if over_floor
            else records.milliseconds(tower, contender, workload)
        )
        patches = records.patches(tower, workload)
        if value is not None and patches is not None:
            is_series = records.towers[tower]["workloads"][workload]["series"]
            (series if is_series else others).append((patches, value))
    if not series and not others:
        return
    style = _style(contender)
    name = "arithmetic floor" if contender == FLOOR else title(contender)
    axes.plot(*_columns(sorted(series)), label=name, marker="o", markersize=3, **style)
    axes.plot(*_columns(others), linestyle="", marker="o", markersize=5, mfc="none", color=style["color"])


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _style(contender: str) -> dict[str, Any]:
    """One colour a contender: ours dashed but the default mode, which is thick."""
    if contender == FLOOR:
        return {"color": "black", "linestyle": ":"}
    position = list(CONTENDERS).index(contender)
    is_ours = contender.startswith("ours")
    return {
        "color": f"C{position}" if position < 10 else _MORE_COLOURS[position - 10],
        "linestyle": "--" if is_ours and contender != OURS else "-",
        "linewidth": 2.5 if contender == OURS else 1.2,
    }

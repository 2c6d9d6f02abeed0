"""The results of `encoder.py` as tables, for the terminal and between marks in documents."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from our_contenders import CONTENDERS
from records import FLOOR, Key, Records
from tabulate import tabulate

OURS = "ours-auto"
_COMPARED = ("eager", "graph-exact", "compile-reduce-overhead")
_SUMMARY = ("eager", "graph-exact", "graph-budgets", "compile", "compile-reduce-overhead")
_PEER = Path(__file__).with_name("results") / "vllm_h200.json"
_MARKED = re.compile(
    r"(?P<begin><!-- encoder\.py: (?P<table>\w+)(?: (?P<tower>[\w.-]+))? -->\n).*?(?P<end><!-- end -->)", re.S
)


def title(contender: str) -> str:
    """What a contender is called in a table."""
    known = CONTENDERS.get(contender)
    return known.title if known is not None else contender


def all_rows(records: Records, tower: str, fmt: str = "simple") -> str:
    """Every number of every contender, workload by workload."""
    lines = []
    for workload in records.workloads(tower):
        for contender in CONTENDERS:
            row = records.rows.get(Key(tower, contender, workload))
            if row is not None:
                lines.append([workload, contender, *_numbers(records, tower, contender, workload, row)])
    headers = ["workload", "contender", "p50", "p99", "CPU", "GPU", "x floor", "eager /"]
    headers += ["MiB", "first s", "padding %", "error", "note"]
    return _tabulate(lines, headers, fmt)


def _numbers(
    records: Records, tower: str, contender: str, workload: str, row: Mapping[str, Any]
) -> list[Any]:
    ratios = [
        records.ratio(tower, workload, contender, FLOOR),
        records.ratio(tower, workload, "eager", contender),
    ]
    times = [row.get(column) for column in ("p50", "p99", "cpu", "gpu")]
    padding = None if "padding" not in row else 100 * row["padding"]
    note = row.get("failure") or row.get("skipped") or row.get("note")
    return [*times, *ratios, _mebibytes(row), row.get("prepare_seconds"), padding, row.get("error"), note]


def starts(records: Records, tower: str, fmt: str = "simple") -> str:
    """What every contender took before its first request, and why some did not run."""
    lines = []
    for contender in CONTENDERS:
        start = records.starts.get(f"{tower} {contender}")
        if start is None:
            continue
        seconds = dict(start.get("seconds", {}))
        total = seconds.pop("start", None)
        parts = ", ".join(f"{name} {taken:.1f}" for name, taken in seconds.items())
        rows = [row for key, row in records.rows.items() if key[:2] == (tower, contender)]
        first = sum(row.get("prepare_seconds", 0.0) for row in rows)
        note = start.get("failure") or start.get("skipped") or parts
        lines.append([contender, title(contender), total, first if rows else None, _mebibytes(start), note])
    headers = ["contender", "what it is", "start s", "first requests s", "MiB", "note"]
    return _tabulate(lines, headers, fmt)


def summary(records: Records, tower: str, fmt: str = "simple") -> str:
    """Median milliseconds of the main contenders side by side, and how many times as fast ours is."""
    measured = records.contenders(tower)
    shown = [name for name in _SUMMARY if name in measured]
    compared = [name for name in _COMPARED if name in measured]
    peer, theirs = _peer(records, tower)
    lines = []
    for workload in records.workloads(tower):
        times = [records.milliseconds(tower, name, workload) for name in (FLOOR, *shown)]
        line = [workload, records.patches(tower, workload), *times]
        line += [theirs.get(workload)] if theirs else []
        line += [records.milliseconds(tower, OURS, workload), records.ratio(tower, workload, OURS, FLOOR)]
        lines.append(line + [records.ratio(tower, workload, name, OURS) for name in compared])
    headers = ["workload", "patches", "floor", *shown, *([peer] if theirs else [])]
    headers += ["ours", "ours / floor", *(f"{name} / ours" for name in compared)]
    return _tabulate(lines, headers, fmt)


def _peer(records: Records, tower: str) -> tuple[str, Mapping[str, float]]:
    """What was measured of another engine on this kind of GPU, in another run; nothing for cut towers."""
    peer = json.loads(_PEER.read_text())
    comparable = records.environment["gpu"] == peer["gpu"] and records.settings["blocks"] is None
    return peer["title"], peer["towers"].get(tower, {}) if comparable else {}


def hardware(records: Records) -> str:
    """One line that says where the figures are from."""
    known = records.environment
    driver = f", driver {known['driver']}" if known["driver"] else ""
    versions = f"torch {known['torch']}, transformers {known['transformers']}, Python {known['python']}"
    what = f"{known['gpu'] or 'CPU'}{driver}, {records.settings['dtype']}, random weights"
    return f"{what}, {versions}, commit {str(known['commit'])[:9]}"


_TABLES: Mapping[str, Callable[..., str]] = {"all": all_rows, "starts": starts, "summary": summary}


def fill_marked(text: str, records: Records) -> str:
    """A document with the tables between its marks written anew.

    A mark is `<!-- encoder.py: summary qwen3-vl-8b -->`, with any table (summary, all, starts) and tower, or
    `<!-- encoder.py: hardware -->`; what it marks ends at `<!-- end -->`. Tables of towers that were not
    measured stay as they are.

    Raises:
        ValueError: a mark names a table that there is not, or there are no marks.
    """

    def table(match: re.Match[str]) -> str:
        kind, tower = match["table"], match["tower"]
        if kind == "hardware":
            return f"{match['begin']}{hardware(records)}\n{match['end']}"
        if kind not in _TABLES:
            raise ValueError(f"encoder.py: {kind}: expected hardware, {', '.join(_TABLES)}")
        if not records.workloads(tower):
            return match[0]
        return f"{match['begin']}\n{_TABLES[kind](records, tower, 'github')}\n\n{match['end']}"

    filled, count = _MARKED.subn(table, text)
    if not count:
        raise ValueError("no marks: expected <!-- encoder.py: summary TOWER --> ... <!-- end -->")
    return filled


def _mebibytes(values: Mapping[str, Any]) -> float | None:
    held = values.get("bytes")
    return None if held is None else held / 2**20


def _tabulate(lines: list[list[Any]], headers: list[str], fmt: str) -> str:
    numeric = [all(isinstance(line[i], int | float | None) for line in lines) for i in range(len(headers))]
    return tabulate(
        [[_shown(value) for value in line] for line in lines],
        headers,
        tablefmt=fmt,
        missingval="-",
        disable_numparse=True,
        colalign=["right" if each else "left" for each in numeric] if lines else None,
    )


def _shown(value: Any) -> Any:
    """Three digits, and all digits of what is larger."""
    if not isinstance(value, float):
        return value
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"

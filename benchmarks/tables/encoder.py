"""The tables of `encoder.py`, for the terminal and between marks in documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from environment import in_words
from our_contenders import CONTENDERS
from records import FLOOR, Key, Records
from storage import RESULTS, load

from fxsplit_encoder.config import MODES
from tables.layout import tabulated

OURS = "ours-auto"
_COMPARED = ("eager", "graph-exact", "compile-reduce-overhead")
_SUMMARY = ("eager", "graph-exact", "graph-budgets", "compile", "compile-reduce-overhead")
_PEER = RESULTS / "vllm_h200.json"
# Of the first page: what a user could run instead.
_IMAGES = ("eager", "compile-reduce-overhead", "graph-exact")


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
    return tabulated(headers, lines, fmt)


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
    return tabulated(headers, lines, fmt)


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
    return tabulated(headers, lines, fmt)


def _peer(records: Records, tower: str) -> tuple[str, Mapping[str, float]]:
    """What was measured of another engine on this kind of GPU, in another run; nothing for cut towers."""
    peer = load(_PEER)
    comparable = records.environment["gpu"] == peer["gpu"] and records.settings["blocks"] is None
    return peer["title"], peer["towers"].get(tower, {}) if comparable else {}


def images(records: Records, tower: str, fmt: str = "simple") -> str:
    """Median milliseconds of single images, and how many times as fast as eager ours is."""
    known = records.towers.get(tower, {}).get("workloads", {})
    shown = [name for name in _IMAGES if name in records.contenders(tower)]
    peer, theirs = _peer(records, tower)
    lines = []
    for workload in (name for name in known if known[name]["series"]):
        times = [records.milliseconds(tower, name, workload) for name in (*shown, OURS)]
        times[-1:-1] = [theirs.get(workload)] if theirs else []
        ratio = records.ratio(tower, workload, "eager", OURS)
        lines.append([workload, records.patches(tower, workload), *times, ratio])
    headers = ["one image", "patches", *map(title, shown), *([peer] if theirs else []), title(OURS)]
    return tabulated([*headers, "eager / ours"], lines, fmt)


def modes(records: Records, tower: str, fmt: str = "simple") -> str:
    """Median milliseconds of eager and of our manager in every mode."""
    shown = {"eager": "eager", **{f"`{mode}`": f"ours-{mode}" for mode in MODES}}
    lines = []
    for workload in records.workloads(tower):
        times = [records.milliseconds(tower, name, workload) for name in shown.values()]
        lines.append([workload, records.patches(tower, workload), *times])
    return tabulated(["workload", "patches", *shown], lines, fmt)


def hardware(records: Records, tower: str | None = None) -> str:
    """One line that says where the figures are from: those of a tower, or all."""
    blocks = records.settings["blocks"]
    cut = [] if blocks is None else [f"at most {blocks} blocks"]
    environment = records.environment
    if tower is not None:
        environment = {
            **environment,
            "commit": records.towers[tower].get("commit", environment.get("commit")),
        }
    return in_words(environment, records.settings["dtype"], "random weights", *cut)


def marked(table: Callable[..., str], caption: str = "") -> Callable[..., str | None]:
    """A table for a mark that names a tower; with a caption, that and the hardware stand below it."""

    def text(stored: Mapping[str, Any], tower: str) -> str | None:
        records = Records.from_dict(stored)
        if not records.contenders(tower):
            return None
        below = f"\n\n{caption} {hardware(records, tower)}." if caption else ""
        return table(records, tower, "pipe") + below

    return text


def marked_hardware(stored: Mapping[str, Any]) -> str:
    """The hardware for a mark of its own, where several tables of a page share it."""
    return hardware(Records.from_dict(stored))


def _mebibytes(values: Mapping[str, Any]) -> float | None:
    held = values.get("bytes")
    return None if held is None else held / 2**20

"""The table in docs/towers.md, written from what benchmarks/towers.py stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tabulate import tabulate

BEGIN = "<!-- figures: begin -->"
END = "<!-- figures: end -->"
CASES = ("small", "medium", "large", "batch of 8")
_GIB = 2**30


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a tower; what failed says so."""
    found = []
    for name, model in result["models"].items():
        row: dict[str, Any] = {"tower": name}
        by_case = {case["case"]: case for case in model.get("cases", [])}
        for case in CASES:
            measured = by_case.get(case)
            row[case] = "-" if measured is None else _milliseconds(measured)
        if by_case:
            row["error"] = f"{max(case['rms error'] for case in by_case.values()):.2f}"
            row["compile s"] = f"{model['compile s']:.0f}"
            row["capture s"] = f"{model['capture s']:.0f}"
            row["GiB"] = f"{model['capture bytes'] / _GIB:.1f}"
        row["failed"] = model.get("failure", "").strip().splitlines()[-1:] or ""
        found.append(row)
    if not any(row["failed"] for row in found):
        for row in found:
            del row["failed"]
    return found


def _milliseconds(case: dict[str, Any]) -> str:
    sizes = case["sizes"]
    size = f"{sizes[0]}: " if len(sizes) == 1 else ""
    return f"{size}{case['eager ms']:.2f} / {case['ours ms']:.2f} = {case['eager / ours']:.2f}"


def document(result: dict[str, Any]) -> str:
    """The table and what it was measured on, as Markdown."""
    text = tabulate(rows(result), "keys", tablefmt="pipe", disable_numparse=True)
    commit = (result["commit"] or "unknown")[:12]
    slower = [
        f"{name} ({case['case']})"
        for name, model in result["models"].items()
        for case in model.get("cases", [])
        if case["slower than eager"]
    ]
    verdict = (
        f"Slower than eager by more than 5 %: {', '.join(slower)}."
        if slower
        else "No entry is slower than eager by more than 5 %."
    )
    return (
        f"{text}\n\nEager / `manager.execute` = ratio, medians in milliseconds. {verdict} Measured on one "
        f"{result['gpu'] or 'CPU'}, driver {result['driver']}, torch {result['torch']}, transformers "
        f"{result['transformers']}, commit {commit}."
    )


def update(path: Path, result: dict[str, Any]) -> None:
    """Replaces what stands between the two marker comments of a file.

    Raises:
        ValueError: it does not have both, in this order.
    """
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path}: expected {BEGIN} and {END}, each on a line of its own")
    path.write_text(f"{before}{begin}\n{document(result)}\n{end}{after}", encoding="utf-8")

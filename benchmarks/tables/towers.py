"""The table of `towers.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from environment import in_words

from tables.layout import by_columns

CASES = ("small", "medium", "large", "batch of 8")
_GIB = 2**30


def figures(result: Mapping[str, Any], fmt: str = "pipe") -> str:
    """A row a tower; what failed says so."""
    rows = [_row(name, model) for name, model in result["models"].items()]
    shown = ["tower", *CASES, "error", "compile s", "capture s", "GiB"]
    shown += ["failed"] if any("failed" in row for row in rows) else []
    return by_columns({name: name for name in shown}, rows, fmt)


def _row(name: str, model: Mapping[str, Any]) -> dict[str, str]:
    row = {"tower": name}
    if cases := model.get("cases"):
        row |= {case["case"]: _milliseconds(case) for case in cases}
        row["error"] = f"{max(case['rms error'] for case in cases):.2f}"
        row["compile s"] = f"{model['seconds']['compile']:.0f}"
        row["capture s"] = f"{model['seconds']['capture']:.0f}"
        row["GiB"] = f"{model['capture bytes'] / _GIB:.1f}"
    if "failure" in model:
        row["failed"] = model["failure"].strip().splitlines()[-1]
    return row


def _milliseconds(case: Mapping[str, Any]) -> str:
    sizes = case["sizes"]
    size = f"{sizes[0]}: " if len(sizes) == 1 else ""
    return f"{size}{case['eager ms']:.2f} / {case['ours ms']:.2f} = {case['eager / ours']:.2f}"


def marked(stored: Mapping[str, Any]) -> str:
    """The table, which entries are slower than eager, and what it was measured on."""
    slower = [
        f"{name} ({case['case']})"
        for name, model in stored["models"].items()
        for case in model.get("cases", [])
        if case["slower than eager"]
    ]
    verdict = (
        f"Slower than eager by more than 5 %: {', '.join(slower)}."
        if slower
        else "No entry is slower than eager by more than 5 %."
    )
    models = [model for model in stored["models"].values() if "pieces" in model]
    cached, pieces = (sum(model[name] for model in models) for name in ("cached pieces", "pieces"))
    cache = f"{cached} of {pieces} distinct pieces came from Inductor's cache, which shortens `compile s`."
    caption = f"Eager / `manager.execute` = ratio, medians in milliseconds. {verdict} {cache}"
    return f"{figures(stored)}\n\n{caption} {in_words(stored)}."

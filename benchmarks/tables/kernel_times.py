"""The tables of `kernel_times.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from environment import in_words

from tables.layout import tabulated

Row = Mapping[str, Any]

PRODUCTS = "matrix products"
ATTENTION = "attention"
POINTWISE = "layer norm, other pointwise and reductions"
COPIES = "copies and memsets"
OTHER = "other"
KINDS = (PRODUCTS, ATTENTION, POINTWISE, COPIES, OTHER)

# The first that fits counts: Inductor names a kernel after the operations that it fuses, and the names of
# attention kernels tell the library of products that they are built with.
_NAMES = (
    (PRODUCTS, r"^triton_tem_"),
    (POINTWISE, r"^triton_"),
    (ATTENTION, r"flash|fmha|sdpa|fprop|attention|attn|attend"),
    (PRODUCTS, r"nvjet|gemm|gemv|cutlass|cublas|split_?k|addmm|::b?mm$"),
    (COPIES, r"^mem(cpy|set)|copy|fill|::cat"),
    (POINTWISE, r"at::native::|^aten::"),
)
_LARGEST = 10
_NAME_LENGTH = 72


def kind_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    return next((kind for kind, pattern in _NAMES if re.search(pattern, kernel, re.I)), OTHER)


def kinds(rows: Sequence[Row], fmt: str = "pipe") -> str:
    """Microseconds by kind, with their share of the replay, a column for each size."""
    columns = []
    for row in rows:
        totals = dict.fromkeys(KINDS, 0.0)
        for kernel in row["kernels"]:
            totals[kind_of(kernel["kernel"])] += kernel["us"]
        replay = row["replay us"]
        totals |= {"gaps": replay - sum(totals.values()), "replay": replay}
        columns.append({kind: f"{us:.0f} ({us / replay:.0%})" for kind, us in totals.items()})
    lines = [[kind, *(column[kind] for column in columns)] for kind in (*KINDS, "gaps", "replay")]
    return tabulated(["kind", *(f"{row['patches']} patches" for row in rows)], lines, fmt)


def largest(rows: Sequence[Row], fmt: str = "pipe") -> str:
    """The ten kernels of each size that take most of the replay."""
    lines = [_line(row, kernel) for row in rows for kernel in _by_time(row["kernels"])[:_LARGEST]]
    return tabulated(["patches", "kernel", "kind", "calls", "us", "share"], lines, fmt)


def _by_time(kernels: Sequence[Row]) -> list[Row]:
    return sorted(kernels, key=lambda kernel: kernel["us"], reverse=True)


def _line(row: Row, kernel: Row) -> list[Any]:
    name, calls, us = (kernel[column] for column in ("kernel", "calls", "us"))
    return [row["patches"], _shortened(name), kind_of(name), calls, us, f"{us / row['replay us']:.1%}"]


def _shortened(kernel: str) -> str:
    """A C++ name without its return type, cut; the rest are template arguments."""
    name = kernel.removeprefix("void ").replace("|", "\\|")
    return f"`{name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 3] + '...'}`"


def marked_kinds(stored: Mapping[str, Any]) -> str:
    where = in_words(stored, stored["tower"])
    return f"{kinds(stored['rows'])}\n\nMicroseconds of one full graph replay, and their share. {where}."


def marked_largest(stored: Mapping[str, Any]) -> str:
    return f"{largest(stored['rows'])}\n\nCalls and microseconds of one replay."

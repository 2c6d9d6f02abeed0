from __future__ import annotations

from typing import Any

from tables.attention import all_rows, kernels, marked

from ..conftest import ENVIRONMENT
from .cells import cells


def row(segments: str, kernel: str, **values: Any) -> dict[str, Any]:
    return {"segments": segments, "tokens": 1024, "kernel": kernel, "chosen": "", **values}


ROWS = [
    row("1024", "torch_flash", known=49.25, captured=66.0, chosen="captured"),
    row("1024", "cudnn_dense", known=40.0, captured=None, chosen="known"),
    row("98 windows", "torch_flash", error="RuntimeError: no kernel", known=30.0),
]


def test_kernels_stand_side_by_side() -> None:
    header, single, windows = cells(kernels(ROWS))
    assert header == ["segments", "`torch_flash`", "`cudnn_dense`"]
    assert single == ["1024", "49.2 / **66.0**", "**40.0** / -"]
    assert windows == ["98 windows", "30.0 / failed", "-"]


def test_every_number_is_listed_and_the_hardware_told() -> None:
    listed = all_rows(ROWS)
    assert len(listed.splitlines()) == 2 + len(ROWS)
    assert "RuntimeError: no kernel" in listed
    assert "16 heads of 72, torch 2.11" in marked({**ENVIRONMENT, "rows": ROWS})

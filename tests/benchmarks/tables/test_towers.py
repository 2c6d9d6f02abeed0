from __future__ import annotations

from tables.towers import figures, marked

from ..tower_results import case, measured, result
from .cells import cells


def test_a_tower_has_a_row_and_what_is_slower_is_named() -> None:
    text = marked(result(clip=measured(case("small", 4, 2), case("batch of 8", 9, 10))))
    header, row = cells(text)
    assert header[-1] == "GiB", "nothing failed"
    expected = ["1: 4.00 / 2.00 = 2.00", "-", "-", "9.00 / 10.00 = 0.90", "1.01", "10", "3", "1.0"]
    assert row == ["clip", *expected]
    assert "Slower than eager by more than 5 %: clip (batch of 8). 3 of 4 distinct pieces came from" in text
    assert "NVIDIA H200, driver 580" in text
    assert "No entry is slower" in marked(result(clip=measured(case("small", 4, 2))))


def test_a_tower_that_failed_says_so() -> None:
    failed = {"failure": "Traceback\nRuntimeError: out of it\n"}
    _, clip, step = cells(figures(result(clip=measured(case("small", 4, 2)), step3p7=failed)))
    assert clip[-1] == "-"
    assert step == ["step3p7", *["-"] * 8, "RuntimeError: out of it"]

"""The figures of the repository are those of its ledger, and the ledger is kept as its rules say."""

from __future__ import annotations

import ast
import tomllib

import pytest

pytest.importorskip("grimp", reason="a development tool, which a GPU host may lack")

from .house import (
    Entry,
    Figure,
    _changing_globals,
    _num_parameters,
    circles,
    improved,
    measure,
    problems,
    read_ledger,
    written,
)


@pytest.mark.slow
def test_no_figure_is_worse_than_the_ledger_or_better_and_not_written_down() -> None:
    assert problems(measure(), read_ledger()) == []


def test_a_worse_figure_and_a_raise_without_a_reason_are_problems() -> None:
    figures = {"a": Figure(3), "b": Figure(3), "c": Figure(3), "d": Figure(3), "new": Figure(1)}
    ledger = {
        "a": Entry(2, 2),
        "b": Entry(4, 4),
        "c": Entry(3, 2),
        "d": Entry(3, 2, reason="two more towers"),
    }
    found = problems(figures, {**ledger, "gone": Entry(1, 1)})
    assert [problem.partition(":")[0] for problem in found] == ["new", "gone", "a", "b", "c"]
    assert "3, worse than 2" in found[2] and "without a reason" in found[4]


def test_what_is_better_is_written_down_and_what_is_worse_is_not() -> None:
    ledger = {"a": Entry(5, 4, 1, "a reason"), "b": Entry(5, 5), "c": Entry(5, 4, reason="still")}
    new = improved({"a": Figure(3), "b": Figure(6), "c": Figure(5), "d": Figure(7)}, ledger)
    assert new == {
        "a": Entry(3, 3, 1),
        "b": Entry(5, 5),
        "c": Entry(5, 4, reason="still"),
        "d": Entry(7, 7),
    }
    assert {name: Entry(**entry) for name, entry in tomllib.loads(written(new)).items()} == new


def test_circles_are_found_through_several_modules() -> None:
    arrows = {("a.x", "b.x"), ("b.x", "c"), ("c", "a.x"), ("a.x", "d")}
    assert circles(arrows) == [("a.x", "b.x", "c")]
    assert circles({("a.x", "b.x"), ("b.y", "a.y")}) == []


@pytest.mark.parametrize(
    ("code", "changing"),
    [
        ("_a = {}\ndef f():\n    _a[1] = 2", ["m: _a"]),
        ("_a = []\ndef f():\n    _a.append(2)", ["m: _a"]),
        ("_a = 1\ndef f():\n    global _a\n    _a = 2", ["m: _a"]),
        ("_a = {1: 2}\n_a[3] = 4\ndef f():\n    return _a[1]", []),
    ],
)
def test_globals_that_functions_change_are_found(code: str, changing: list[str]) -> None:
    assert list(_changing_globals({"m": ast.parse(code)}).items) == changing


@pytest.mark.parametrize(
    ("signature", "count"), [("self, a, /, b, *, c", 3), ("a, *args, **kwargs", 3), ("cls", 0), ("", 0)]
)
def test_parameters_are_counted_without_self(signature: str, count: int) -> None:
    function = ast.parse(f"def f({signature}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert _num_parameters(function) == count

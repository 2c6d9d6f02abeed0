"""`make house`: every figure is computed, and those that are right stay right."""

from __future__ import annotations

import ast

import pytest

pytest.importorskip("grimp", reason="a development tool, which a GPU host may lack")

from house import calls, imports, table
from house.measure import Measure
from house.private import private_uses
from house.sources import num_parameters

KEPT = (
    "import circles of modules",
    "import circles of neighbors in a package",
    "upward imports",
    "... upward imports for annotations alone",
)


@pytest.fixture(scope="module")
def measures() -> dict[str, Measure]:
    return {measure.name: measure for measure in table.measure_all()}


@pytest.fixture(scope="module")
def import_measures() -> dict[str, Measure]:
    return {measure.name: measure for measure in imports.measure_imports()}


@pytest.mark.parametrize("name", KEPT)
def test_imports_stay_in_order(import_measures: dict[str, Measure], name: str) -> None:
    assert import_measures[name].value == 0, import_measures[name].items


@pytest.mark.slow
def test_every_measure_is_a_number_and_has_a_row(measures: dict[str, Measure]) -> None:
    assert all(type(measure.value) is int and measure.value >= 0 for measure in measures.values())
    assert {measure.ok for measure in measures.values()} <= {True, False, None}
    text = table.table(list(measures.values()))
    assert all(name in text for name in measures)


@pytest.mark.slow
def test_sizes_and_stacks_are_not_empty(measures: dict[str, Measure]) -> None:
    replay = measures["hops from execute to the graph's replay"]
    capture = measures["frames from capture to a piece's recording"]
    assert measures["lines"].value > measures["files"].value > 100
    assert measures["most parameters of a function"].value >= 2
    for measure, first, last in ((replay, ".execute", ".replay"), (capture, ".capture", ".captured")):
        assert measure.value == len(measure.items) >= 2
        assert measure.items[0].endswith(f"EncoderCudaGraphManager{first}")
        assert measure.items[-1].endswith(f"SegmentedCapture{last}")


def test_circles_are_found_through_several_modules_and_between_packages() -> None:
    arrows = {("p.a.x", "p.b.x"), ("p.b.x", "p.c"), ("p.c", "p.a.x"), ("p.a.x", "p.d")}
    assert imports._circles(arrows) == [("p.a.x", "p.b.x", "p.c")]
    assert imports._circles({("p.a.x", "p.b.x"), ("p.b.y", "p.a.y")}) == []
    assert imports._package_circles({("p.a.x", "p.b.x"), ("p.b.y", "p.a.y")}) == [("p.a", "p.b")]


def test_an_import_of_a_higher_floor_is_upward() -> None:
    floors = {"low": 0, "high": 1}
    arrows = {
        ("fxsplit_encoder.low.x", "fxsplit_encoder.high"),
        ("fxsplit_encoder.high", "fxsplit_encoder.low"),
    }
    upward = imports._upward("", arrows, floors, goal=0)
    assert upward.items == ("low.x -> high",)
    assert upward.ok is False


def test_a_call_of_a_higher_floor_is_a_climb() -> None:
    code = test_a_call_of_a_higher_floor_is_a_climb.__code__
    manager, capture = (
        calls.Frame(f"fxsplit_encoder.{name}.x", "f", code) for name in ("manager", "capture")
    )
    assert calls._climbs([(manager, capture, capture)]) == ()
    assert calls._climbs([(manager, capture, manager)]) == ("capture.x: f -> manager.x: f",)


@pytest.mark.parametrize(
    ("code", "uses"),
    [
        ("import torch\ntorch._C._f()", {"torch._C._f"}),
        ("import torch._inductor.config", {"torch._inductor.config"}),
        ("from torch.utils import _pytree", {"torch.utils._pytree"}),
        ("from triton.runtime import driver", {"triton.runtime.driver"}),
        ("import torch\naten = torch.ops.aten\naten._f.default(1)", {"torch.ops.aten._f.default"}),
        ("import torch\nknown = {torch.ops.aten._f.default}", set()),
        ("storage._cdata, self._version", {"._cdata"}),
        ("node._erased, node._ours, node._fxsplit_mark", {"._erased"}),
        ("getattr(op, '_schema', None)", {"._schema"}),
        ("import torch, sys\nsys._getframe()\ntorch.__version__, torch.nn.Linear", set()),
    ],
)
def test_private_apis_are_found(code: str, uses: set[str]) -> None:
    assert private_uses(ast.parse(code), frozenset({"_ours", "_version"})) == uses


@pytest.mark.parametrize(
    ("signature", "count"), [("self, a, /, b, *, c", 3), ("a, *args, **kwargs", 3), ("cls", 0), ("", 0)]
)
def test_parameters_are_counted_without_self(signature: str, count: int) -> None:
    function = ast.parse(f"def f({signature}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert num_parameters(function) == count


def test_a_rough_goal_leaves_a_tenth() -> None:
    assert Measure("", 11, 10, about=True).ok
    assert not Measure("", 11, 10).ok
    assert not Measure("", 12, 10, about=True).ok
    assert Measure("", 12).ok is None

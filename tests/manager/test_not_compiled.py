"""Towers that are not to be compiled, and what a tower that does not compile costs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.errors import ConfigError

from . import managers
from .mock_towers import (
    AxesModel,
    PackedModel,
    PathsModel,
    SplitModel,
    UntraceableModel,
    assert_serves,
    batch,
    items,
)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for everything that is traced."""
    trace, made = torch.compile, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append("trace")
        return trace(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", counted)
    return made


captured = functools.partial(managers.captured, token_budgets=(4, 8), mode="auto", debug=False)


@pytest.mark.parametrize(
    ("mode", "graphs"),
    [("full", "full"), ("auto", "full"), ("piecewise", "breakable"), ("breakable", "breakable")],
)
def test_a_tower_is_captured_as_it_is_where_that_is_asked_for(
    mode: str, graphs: str, traces: list[str]
) -> None:
    model = SplitModel()
    manager = captured(model, mode=mode, compile=False, debug=True)
    assert {graph.mode for graph in manager.budget_graphs["default"].values()} == {graphs}
    for lengths in ((3,), (2, 5), (9,)):
        assert_serves(manager, batch(*lengths))
    assert manager.stats().hits == 3
    assert manager.stats().fallback_runs == {"eager": 1}
    assert (manager.programs, manager.reports, traces) == ({"default": None}, [], [])


@pytest.mark.parametrize("settings", [{"piece_compiler": "eager"}, {"passes": ["conv_to_linear"]}])
def test_what_is_of_compiled_pieces_contradicts_it(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"^{name}: applies to compiled pieces, and compile is false"):
        fx.EncoderConfig(compile=False, **settings)


def test_torch_compile_has_compiled_already() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="encoder_cg", options={"compile": False})
    with torch.no_grad(), pytest.raises(Exception, match=r"compile: torch\.compile has traced"):
        compiled(torch.ones(1, 2))


def read(output: Tensor) -> Tensor:
    return torch.full((), 1.0 if output.isfinite().all().item() else 2.0)


class ReadsValues(UntraceableModel):
    """Its forward reads a value on the host, in the open or in a break."""

    read = staticmethod(read)

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        output = super().encoder_cudagraph_forward(inputs, path)
        return output * self.read(output)


class ReadsInABreak(ReadsValues):
    read = staticmethod(fx.eager_break_during_capture(read))


@pytest.mark.parametrize(
    ("make", "mode", "modes", "report"),
    [
        (ReadsValues, "breakable", set(), "_local_scalar_dense"),
        (ReadsInABreak, "breakable", {"breakable"}, None),
        # In one graph it cannot be: the budget is captured in the mode that can.
        (ReadsInABreak, "full", {"breakable"}, "captured in mode breakable: in mode full"),
    ],
)
def test_what_cannot_be_captured_names_the_op_and_the_rest_serves(
    make: Any, mode: str, modes: set[str], report: str | None
) -> None:
    model = make()
    manager = captured(model, mode=mode, compile=False, debug=True)
    assert {graph.mode for graph in manager.budget_graphs["default"].values()} == modes
    assert any(report in line for line in manager.reports) if report else manager.reports == []
    assert_serves(manager, batch(3, 2))
    assert manager.stats().misses == ({} if modes else {fx.MissReason.NOT_CAPTURED: 2})


def test_one_refusal_is_that_of_all_axis_keys_and_paths(traces: list[str]) -> None:
    model = AxesModel()
    manager = captured(model)
    assert traces == ["trace"]
    assert len(manager.reports) == 4
    assert all("captured without compiling: the forward does not trace" in r for r in manager.reports)
    assert_serves(manager, items(model, (3,), (2,), keys=[(4, 1), (8, 2)]))

    manager = captured(PathsModel())
    assert traces == ["trace"] * 2
    assert [report.partition(": the forward")[0] for report in manager.reports] == [
        "path global: captured without compiling",
        "path local: captured without compiling, as path global is",
    ]


def test_nothing_is_compiled_where_nothing_counts_tokens() -> None:
    compiled = []

    def note(module: Any, inputs: Any) -> Any:
        compiled.append(module)
        return module.forward

    manager = captured(PackedModel(), piece_compiler=note)
    assert "it has no splitting op" in manager.reports[0]
    assert compiled == []
    captured(SplitModel(), piece_compiler=note)
    assert compiled

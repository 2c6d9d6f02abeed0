"""Which captures are made and kept: plans, gain for memory, the byte limit, and memory that they share."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fxsplit_encoder as fx
from fxsplit_encoder.capture.buffers import SharedBuffers, StaticBuffer
from fxsplit_encoder.capture.inputs import StaticInputs
from fxsplit_encoder.errors import ReplayError
from fxsplit_encoder.planning.costs import PathCosts
from fxsplit_encoder.runtime.memory_limit import least_useful

from .managers import captured, captured_budgets, manager_of
from .mock_towers import (
    AlwaysSkipped,
    AxesModel,
    PackedModel,
    PathsModel,
    SplitModel,
    assert_serves,
    batch,
    items,
)

pytestmark = pytest.mark.usefixtures("traced_once")


def test_a_budget_whose_inputs_do_not_fit_costs_no_other() -> None:
    def greedy(values: dict[str, Any], budget: int | None = None) -> dict[str, Any]:
        if budget == 8:
            raise torch.OutOfMemoryError("out of memory: none left")
        return values

    model: Any = SplitModel()
    manager = manager_of(model, token_budgets=(4, 8), piece_compiler="eager")
    manager.compile()
    model.made = greedy
    manager.capture()
    assert captured_budgets(manager) == {"default": [4]}
    assert "budget 8 is not captured: out of memory" in manager.reports[0]


@pytest.mark.parametrize("make_model", [PathsModel, AxesModel, PackedModel, SplitModel])
@pytest.mark.parametrize("mode", ["full", "breakable"])
def test_the_planned_bytes_are_held(make_model: Any, mode: str) -> None:
    manager = manager_of(make_model(), mode=mode)
    planned = manager.planned_captures().input_bytes
    manager.capture()
    assert manager.stats().input_bytes == planned
    single = manager_of(make_model(), mode=mode, token_budgets=(16,)).planned_captures().input_bytes
    # Smaller budgets add what is of one size for all of them, a few numbers, and nothing else.
    assert single <= planned <= single + 2 * 8 * len(manager.paths_by_key)


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(sorted),
    st.lists(st.integers(1, 1000), min_size=5, max_size=5),
    st.booleans(),
)
def test_the_gain_is_what_all_sizes_would_cost_more(
    budgets: list[int], sizes: list[int], measured: bool
) -> None:
    costs = (
        PathCosts({b: 1.0 + b for b in budgets}, exact=((1, 51.0), (40, 90.0)))
        if measured
        else PathCosts.unmeasured(budgets)
    )
    sizes = sizes[: len(budgets)]

    def total(ladder: list[int]) -> float:
        # Measured: a replay costs 1 + budget, the exact shape 50 + tokens; else 64 + budget and 256 + tokens.
        launch, exact = (1, 50) if measured else (64, 256)
        return (
            sum(min([launch + b for b in ladder if b >= n] + [exact + n]) for n in range(1, budgets[-1] + 1))
            / budgets[-1]
        )

    gains = {
        budget: (total([b for b in budgets if b != budget]) - total(budgets)) / size
        for budget, size in zip(budgets, sizes, strict=True)
    }
    budget, gain = least_useful(costs, budgets, sizes, skippable=False)
    assert gain == pytest.approx(min(gains.values()))
    assert gains[budget] == pytest.approx(gain)


# --- the byte limit


@pytest.fixture(scope="module")
def unlimited() -> fx.EncoderCudaGraphManager:
    return captured(PathsModel(), compile=False)


@settings(max_examples=10)
@given(share=st.floats(0.01, 1.2))
@example(share=0.01)
@example(share=1.0)
def test_vllm_49224_vllm_49233_what_is_kept_fits_the_limit_and_serves(unlimited: Any, share: float) -> None:
    limit = int(unlimited.num_bytes * share)
    model = PathsModel()
    manager = captured(model, max_graph_bytes=limit, compile=False)
    assert manager.num_bytes <= limit
    graphs = sum(map(len, captured_budgets(manager).values()))
    assert graphs + sum("is dropped" in report for report in manager.reports) == 6
    assert all("max_graph_bytes allows" in r for r in manager.reports if "is dropped" in r)
    if share >= 1:
        assert graphs == 6
    # The smallest capture: four rows of eight numbers in and out, their item numbers, and one factor.
    if limit >= 4 * (32 + 32 + 8) + 4:
        assert graphs > 0, "a budget that fits by itself was dropped"
    assert_serves(manager, items(model, (3, 2), (7, 0), (9, 12)))
    stats = manager.stats()
    assert stats.graph_bytes + stats.input_bytes == manager.num_bytes


def test_a_budget_that_exceeds_the_limit_alone_goes_first() -> None:
    small = captured(PathsModel(), token_budgets=(4, 8)).num_bytes
    manager = captured(PathsModel(), token_budgets=(4, 8, 100), max_graph_bytes=small)
    assert captured_budgets(manager) == {"global": [4, 8], "local": [4, 8]}
    dropped = [report for report in manager.reports if "is dropped" in report]
    assert [report.split(" is dropped")[0] for report in dropped] == [
        "path global: budget 100",
        "path local: budget 100",
    ]
    assert all(report.endswith(f"max_graph_bytes allows {small}, by this one alone") for report in dropped)
    assert manager.num_bytes == small


class RefusingPaths(PathsModel):
    """It can make inputs of no size up to `refused`."""

    refused = 16

    def made(self, values: dict[str, Any], budget: int | None = None) -> dict[str, Any]:
        if budget is not None and budget <= self.refused:
            raise ValueError(f"{budget} tokens are too few")
        return values


class NoModality(PathsModel):
    def get_encoder_cudagraph_config(self) -> Any:
        config = super().get_encoder_cudagraph_config()
        config.modalities = []
        return config


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (RefusingPaths(), {}, "path local: budget 16 is not captured: path local: no inputs for 16 tokens"),
        (PathsModel(), {"max_graph_bytes": 1}, "max_graph_bytes allows 1"),
        (NoModality(), {}, "the tower declares no modality for them"),
        (
            AlwaysSkipped(),
            {"paths": {name: {"token_budgets": [0]} for name in AlwaysSkipped.path_configs}},
            "no path has a budget",
        ),
    ],
)
def test_found_d_an_enabled_manager_without_captures_is_one_error(
    model: Any, options: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fxsplit_encoder"):
        manager = captured(model, **options)
        reports = list(manager.reports)
        manager.capture()
    (message,) = said(caplog, logging.ERROR)
    assert message.startswith("encoder CUDA graphs are enabled, but no budget could be captured")
    assert reason in message
    assert manager.reports == reports
    assert len(set(reports)) == len(reports)
    assert manager.num_bytes == 0
    assert_serves(manager, items(model, (3, 2)))


def test_an_idle_manager_without_captures_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxsplit_encoder"):
        for options in ({"mode": "none"}, {"enabled": False}):
            model = RefusingPaths()
            manager = captured(model, **options)
            manager.execute(items(model, (3, 2)))
            manager_of(model, **options).execute(items(model, (3, 2)))
        captured(PathsModel(), mode="exact")
    assert not said(caplog, logging.ERROR)
    assert not any("nothing has been captured" in message for message in said(caplog, logging.WARNING))


def test_the_first_execution_without_a_capture_warns(caplog: pytest.LogCaptureFixture) -> None:
    model = PathsModel()
    manager, inputs = manager_of(model), items(model, (3, 2))
    with caplog.at_level(logging.WARNING, "fxsplit_encoder"):
        for _ in range(3):
            assert_serves(manager, inputs)
        assert sum("nothing has been captured" in message for message in said(caplog, logging.WARNING)) == 1
        caplog.clear()
        after = captured(model)
        after.execute(inputs)
        after.clear()
        after.execute(inputs)  # it was captured once: whoever cleared it knows
    assert not any("nothing has been captured" in message for message in said(caplog, logging.WARNING))


def test_reports_are_those_of_the_last_capture() -> None:
    model = RefusingPaths()
    model.refused = 4
    manager = captured(model)
    before = list(manager.reports)
    assert sum("budget 4 is not captured" in report for report in before) == 2
    manager.clear()
    assert manager.reports == []
    manager.capture()
    assert manager.reports == before
    manager.clear()
    model.refused = 0
    manager.capture()
    assert manager.reports == [report for report in before if "captured without compiling" in report]


def test_found_i_capturing_twice_changes_nothing() -> None:
    manager = captured(PathsModel())
    before, num_bytes = manager.budget_graphs, manager.num_bytes
    manager.capture()
    assert manager.num_bytes == num_bytes
    for name, graphs in manager.budget_graphs.items():
        assert all(graph.graph is before[name][budget].graph for budget, graph in graphs.items())


# --- shared static buffers


def test_a_value_may_be_kept_only_until_another_budget_fills_the_memory() -> None:
    model = SplitModel()
    manager = captured(model)
    small, large = batch(3), batch(4, 8)
    expected = model.encoder_eager_forward(small)
    model.encoder_eager_forward = lambda mm_kwargs, path="default": expected
    manager.execute(small)
    model.made = lambda values, budget=None: values | {"patches": None}
    torch.testing.assert_close(manager.execute(small)[0], expected, rtol=0, atol=1e-5)
    assert manager.stats().hits == 2
    del model.made
    manager.execute(large)
    model.made = lambda values, budget=None: values | {"patches": None}
    # What the small budget would keep are the first rows of the large batch: it has to be encoded anew.
    torch.testing.assert_close(manager.execute(small)[0], expected, rtol=0, atol=1e-5)
    assert manager.stats().misses == {fx.MissReason.EXTENT_EXCEEDED: 1}


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8)), max_size=12))
def test_shared_buffers_hold_the_last_value_and_zeros(loads: list[tuple[int, int]]) -> None:
    memory = SharedBuffers()
    sizes = (8, 5, 2)
    buffers = [memory.share(StaticBuffer("x", torch.full((size, 3), 7.0))) for size in sizes]
    assert memory.num_bytes == 8 * 3 * 4
    for number, (which, rows) in enumerate(loads, start=1):
        buffer = buffers[which]
        count = min(rows, sizes[which])
        buffer.load(torch.full((count, 3), float(number)))
        assert buffer.tensor[:count].eq(number).all()
        assert buffer.tensor[count:].eq(0).all()
        others = [other for other in buffers if other is not buffer]
        StaticInputs([buffer]).check({"x": None})
        for other in others:
            with pytest.raises(ReplayError, match="x: the replay would keep"):
                StaticInputs([other]).check({"x": None})
    late = memory.share(StaticBuffer("x", torch.full((6, 3), 7.0)))
    assert late.tensor.eq(7).all()
    late.load(torch.ones(1, 3))
    assert late.tensor[1:].eq(0).all()


def test_what_differs_in_more_than_its_rows_has_memory_of_its_own() -> None:
    memory = SharedBuffers()
    first = memory.share(StaticBuffer("x", torch.zeros(8, 3)))
    others = [
        StaticBuffer("x", torch.zeros(4, 2)),
        StaticBuffer("x", torch.zeros(4, 3, dtype=torch.float64)),
        StaticBuffer("x", torch.zeros(9, 3)),
        StaticBuffer("y", torch.zeros(4, 3)),
    ]
    tensors = [first.tensor, *(memory.share(buffer).tensor for buffer in others)]
    for one, other in itertools.combinations(tensors, 2):
        assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()

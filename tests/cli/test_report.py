"""What a recorded run comes to."""

from __future__ import annotations

from typing import Any

import pytest

from fxsplit_encoder.cli.report import (
    AT_EXACT_SHAPE,
    EAGERLY,
    IN_PADDING,
    IN_REPLAYS,
    RunSummary,
    summarize,
    what_to_do,
)
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.tuning.trace import RecordedRun, RunRecord, TracedRequest

from ..tuning.test_recording import RUN

COSTS = {"replay_ms": {"64": 1.0, "128": 2.0}, "exact_ms": {"64": 6.0, "128": 8.0}}


def run(costs: Any = None) -> RunRecord:
    captures = [{"budget": budget, "mode": "full", "num_bytes": 2**20} for budget in (64, 128)]
    path = {"budgets": [64, 128], "captures": captures, "costs": costs}
    return RunRecord.model_validate({**RUN, "paths": {"default": path}})


def served(*batches: dict[str, Any], host_ms: float = 1.0) -> TracedRequest:
    """A request; of each batch the path "default", an item each."""
    made = [
        {"items": [n], "output_tokens": path["tokens"], "paths": {"default": path}}
        for n, path in enumerate(batches)
    ]
    items = [{"input_size": 4 * path["tokens"], "output_tokens": path["tokens"]} for path in batches]
    return TracedRequest.model_validate({"items": items, "batches": made, "host_ms": host_ms})


def hit(tokens: int, budget: int, milliseconds: float | None = None) -> dict[str, Any]:
    return {"tokens": tokens, "budget": budget, "result": "hit", "milliseconds": milliseconds}


def miss(tokens: int, reason: str, *, eager: bool = False) -> dict[str, Any]:
    return {"tokens": tokens, "result": reason, "eager": eager}


REQUESTS = (
    served(hit(48, 64), hit(128, 128), host_ms=2.0),
    served(hit(32, 64)),
    served(miss(200, "over_largest_budget"), host_ms=3.0),
    served(miss(100, "not_captured", eager=True), miss(100, "not_captured", eager=True)),
)


def summary(requests: tuple[TracedRequest, ...] = REQUESTS, costs: Any = None) -> RunSummary:
    return summarize(RecordedRun((run(costs),), requests))


def test_without_measured_costs_tokens_are_counted() -> None:
    found = summary()
    assert found.unit == "tokens"
    assert found.places == pytest.approx(
        {IN_REPLAYS: 48 + 32 + 128, IN_PADDING: 16 + 32, AT_EXACT_SHAPE: 200, EAGERLY: 200}
    )
    small, large = found.budgets
    assert (small.budget, small.replays, small.tokens, small.cost) == (64, 2, 80, 128)
    assert (small.padding_fraction, large.padding_fraction) == (48 / 128, 0)
    assert (found.requests, found.items, found.hit_fraction) == (4, 6, 0.5)
    assert found.misses == {"not_captured": 2, "over_largest_budget": 1}
    assert found.padding_fraction == pytest.approx(48 / 256)
    assert found.host_ms == {"median": 1.5, "p90": 3.0, "total": 7.0}


def test_measured_costs_are_milliseconds_also_where_none_was_predicted() -> None:
    found = summary((served(hit(32, 64, 1.5), hit(96, 128)), served(miss(128, "disabled"))), COSTS)
    assert found.unit == "ms"
    assert found.places == pytest.approx(
        {IN_REPLAYS: 0.75 + 1.5, IN_PADDING: 0.75 + 0.5, AT_EXACT_SHAPE: 8.0, EAGERLY: 0}
    )
    assert [(use.budget, use.cost) for use in found.budgets] == [(64, 1.5), (128, 2.0)]


def test_a_path_that_is_skipped_costs_nothing_and_misses_nothing() -> None:
    found = summary((served(hit(64, 64), {"tokens": 0, "result": "skipped"}),))
    assert sum(found.places.values()) == 64
    assert (found.misses, found.hit_fraction) == ({}, 1.0)


def test_captures_of_recurring_sizes_are_listed_too() -> None:
    found = summary((served(hit(100, 100)), served(hit(100, 100))))
    (exact,) = [use for use in found.budgets if not use.mode]
    assert (exact.budget, exact.replays, exact.num_bytes, exact.padding_fraction) == (100, 2, None, 0)


def test_advice_names_what_stands_out() -> None:
    missed, over = summary().advice
    assert missed.startswith("33% of the items missed as not_captured: call capture()")
    assert over.startswith("17% of the items missed as over_largest_budget: add a larger budget")
    (unused,) = summary((served(hit(64, 64)),)).advice
    assert unused == "1 of 2 budgets served nothing (1.0 MiB)."
    assert summary((served(hit(64, 64), hit(128, 128)),)).advice == ()
    (padding,) = summary((served(hit(32, 64), hit(128, 128)),)).advice
    assert padding.startswith("17% of the work is padding")


def test_every_reason_has_a_remedy() -> None:
    assert all(map(what_to_do, MissReason))


def test_everything_is_json() -> None:
    as_dict = summary().as_dict()
    assert as_dict["budgets"][0]["padding_fraction"] == 48 / 128
    assert as_dict["run"]["paths"]["default"]["budgets"] == [64, 128]

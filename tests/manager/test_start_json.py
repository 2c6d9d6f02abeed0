from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.capture.ladder import KnownBudget, MeasuredCosts
from fxsplit_encoder.errors import StartFileError
from fxsplit_encoder.kernels.attention import AttentionShape
from fxsplit_encoder.kernels.store import entries_of
from fxsplit_encoder.manager.start import KnownTower, table_from_json, tower_from_json
from fxsplit_encoder.runtime import KnownCosts, MeasuredForward

from ..kernels.attention.fakes import CUDA
from ..kernels.test_store import tables

times = st.floats(0, 1e9) | st.just(math.inf)
costs = st.builds(
    MeasuredCosts,
    st.dictionaries(st.sampled_from(["full", "piecewise"]), times, max_size=2),
    times,
    times,
    times,
    st.none() | times,
)
forwards = st.builds(
    MeasuredForward,
    st.lists(st.tuples(st.integers(1, 10**6), times), max_size=3).map(tuple),
    times,
    st.floats(0.1, 9),
    st.floats(0.01, 1),
    st.floats(0.01, 1),
    st.none() | st.integers(1, 99),
    times,
)
budgets = st.dictionaries(
    st.integers(1, 10**6), st.builds(KnownBudget, costs, st.sampled_from(["full", "piecewise", None]))
)
towers = st.builds(
    KnownTower,
    st.just({"tower": "T", "items": 4, "settings.mode": None}),
    st.dictionaries(st.text(max_size=9), st.builds(KnownCosts, forwards, budgets, times), max_size=2),
)


@settings(max_examples=25)
@given(known=towers)
def test_what_was_measured_of_a_tower_comes_back(known: KnownTower) -> None:
    assert tower_from_json(json.dumps(asdict(known)).encode()) == known


@settings(max_examples=15)
@given(table=tables)
def test_what_was_measured_of_attention_comes_back(table: dict) -> None:
    assert table_from_json(json.dumps(entries_of(table)).encode(), AttentionShape, CUDA) == table


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"{",
        lambda content: b"{}",
        lambda content: content.replace(b"capture_ms", b"capture_us"),
        lambda content: content.replace(b'"rows_per_token": 1.0', b'"rows_per_token": "many"'),
    ],
)
def test_anything_else_is_refused(change: object) -> None:
    known = KnownTower({}, {"path default": KnownCosts(MeasuredForward(), {}, 1.0)})
    content = json.dumps(asdict(known)).encode()
    assert tower_from_json(content) == known
    with pytest.raises(StartFileError, match=r"^tower: expected"):
        tower_from_json(change(content))  # type: ignore[operator]
    with pytest.raises(StartFileError, match=r"^attention: expected"):
        table_from_json(json.dumps([{"shape": {}}]).encode(), AttentionShape, CUDA)

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.tuning.costs import BatchCosts, MemoryModel, RisingCurve, read_costs

POINTS = {"64": 1.7, "256": 3.5, "1024": 17.7}


def test_a_curve_is_straight_between_its_points() -> None:
    curve = RisingCurve.from_mapping({200: 4.0, 100: 2.0, 400: 5.0})
    np.testing.assert_allclose(curve([100, 150, 200, 300, 400]), [2, 3, 4, 4.5, 5])
    np.testing.assert_allclose(curve([0, 99]), 2)  # below the first point a replay costs its launches
    np.testing.assert_allclose(curve([600, 800]), [6, 7])  # the last slope goes on
    assert RisingCurve(((100, 2.0),))(5000) == 100.0  # a single point is taken in proportion
    assert RisingCurve(((0, 2.0),))(5000) == 2.0


def test_a_point_that_falls_is_noise() -> None:
    curve = RisingCurve(((64, 2.0), (128, 1.9), (256, 3.0), (512, 2.5)))
    np.testing.assert_allclose(curve([64, 128, 256, 512, 9000]), [2, 2, 3, 3, 3])


@given(
    st.dictionaries(st.integers(0, 5000), st.floats(0.01, 100), min_size=1, max_size=6),
    st.lists(st.integers(0, 10_000), min_size=2, max_size=20),
)
def test_more_tokens_never_cost_less(points: dict[int, float], tokens: list[int]) -> None:
    costs = RisingCurve.from_mapping(points)(sorted(tokens))
    assert (np.diff(costs) >= -1e-9 * costs[:-1]).all()


@given(
    st.dictionaries(st.integers(0, 8), st.integers(1, 9).map(float), min_size=1, max_size=5),
    st.lists(st.integers(1, 20), min_size=1, max_size=9),
)
def test_the_planner_prices_batches_by_the_same_curves(points: dict[int, float], tokens: list[int]) -> None:
    curve = RisingCurve.from_mapping(points)
    path_costs = BatchCosts(curve, curve).of_ladder(sorted(set(tokens)))
    for count in tokens:
        assert path_costs.replay[count] == pytest.approx(float(curve(count)))
        assert path_costs.exact_curve.at(count) == pytest.approx(float(curve(count)))


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    costs = BatchCosts.measured({64: 1.0, 256: 2.0}, {64: 5.0}, not_kept_from=512)
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(costs.as_dict()), encoding="utf-8")
    assert read_costs(file) == costs
    file.write_text(json.dumps({**costs.as_dict(), "not_kept_from": True}), encoding="utf-8")
    with pytest.raises(InputError, match="not_kept_from: expected output tokens; got True"):
        read_costs(file)


def test_budgets_are_kept_where_a_replay_gains() -> None:
    costs = BatchCosts.measured({100: 1.0, 200: 2.0}, {100: 2.0, 200: 2.04})
    assert costs.keeps(np.array([50, 100, 150, 200])).tolist() == [True, True, True, False]
    measured = BatchCosts.measured({100: 1.0, 200: 2.0}, {100: 9.0}, not_kept_from=150)
    assert measured.keeps(np.array([100, 150, 200])).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ((), "at least one point"),
        (((64, 0.0),), "above 0; got 64: 0.0"),
        (((64, math.nan),), "got 64: nan"),
        (((-1, 1.0),), "got -1: 1.0"),
        (((64, 1.0), (64, 2.0)), "increasing tokens; got 64 after 64"),
    ],
)
def test_impossible_points(points: tuple[tuple[int, float], ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RisingCurve(points)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 100), st.integers(0, 10**12))
def test_the_largest_budget_is_the_largest_that_fits(a: int, b: int, graphs: int, limit: int) -> None:
    memory = MemoryModel(bytes_per_token=a, bytes_per_graph=b)
    largest = memory.largest_budget(limit, graphs)
    assert memory.num_bytes(largest, graphs) <= limit < memory.num_bytes(largest + 1, graphs)


@pytest.mark.parametrize("sizes", [(0, 1), (1, -1)])
def test_impossible_memory(sizes: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="bytes_per_token of at least 1"):
        MemoryModel(*sizes)


def write(tmp_path: Path, value: object) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def test_costs_are_read_for_all_paths_or_for_each(tmp_path: Path) -> None:
    measured = {"replay_ms": POINTS, "exact_ms": {"64": 5}}
    replay = {64: 1.7, 256: 3.5, 1024: 17.7}
    assert read_costs(write(tmp_path, measured)) == BatchCosts.measured(replay, {64: 5.0})
    assert read_costs(write(tmp_path, {"global": measured, "local": measured})) == {
        "global": BatchCosts.measured(replay, {64: 5.0}),
        "local": BatchCosts.measured(replay, {64: 5.0}),
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "expected JSON"),
        ({"replay_ms": POINTS}, "expected an object with replay_ms and exact_ms"),
        ({"global": POINTS}, "global: expected an object with replay_ms and exact_ms"),
        ({"replay_ms": 3, "exact_ms": POINTS}, "replay_ms: expected an object, tokens to milliseconds"),
        ({"replay_ms": POINTS, "exact_ms": {"6": True}}, "got '6': True"),
        ({"replay_ms": POINTS, "exact_ms": {}}, "at least one point"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, value: object, message: str) -> None:
    path = write(tmp_path, value)
    with pytest.raises(InputError, match=message) as caught:
        read_costs(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.json: cannot be read: No such file"):
        read_costs(tmp_path / "absent.json")

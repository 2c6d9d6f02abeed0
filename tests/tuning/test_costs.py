import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.tuning.costs import BatchCosts, rising
from fxsplit_encoder.tuning.trace import MeasuredCosts


def test_a_curve_is_straight_between_its_points() -> None:
    curve = rising({200: 4.0, 100: 2.0, 400: 5.0})
    np.testing.assert_allclose(curve([100, 150, 200, 300, 400]), [2, 3, 4, 4.5, 5])
    np.testing.assert_allclose(curve([0, 99]), 2)  # below the first point a replay costs its launches
    np.testing.assert_allclose(curve([600, 800]), [6, 7])  # the last slope goes on
    assert rising({100: 2.0})(5000) == 100.0  # a single point is taken in proportion
    assert rising({0: 2.0})(5000) == 2.0


def test_a_point_that_falls_is_noise() -> None:
    curve = rising({64: 2.0, 128: 1.9, 256: 3.0, 512: 2.5})
    np.testing.assert_allclose(curve([64, 128, 256, 512, 9000]), [2, 2, 3, 3, 3])


@given(
    st.dictionaries(st.integers(0, 5000), st.floats(0.01, 100), min_size=1, max_size=6),
    st.lists(st.integers(0, 10_000), min_size=2, max_size=20),
)
def test_more_tokens_never_cost_less(points: dict[int, float], tokens: list[int]) -> None:
    costs = rising(points)(sorted(tokens))
    assert (np.diff(costs) >= -1e-9 * costs[:-1]).all()


@given(
    st.dictionaries(st.integers(0, 8), st.integers(1, 9).map(float), min_size=1, max_size=5),
    st.lists(st.integers(1, 20), min_size=1, max_size=9),
)
def test_the_planner_prices_batches_by_the_same_curves(points: dict[int, float], tokens: list[int]) -> None:
    curve = rising(points)
    path_costs = BatchCosts(curve, curve).of_ladder(sorted(set(tokens)))
    for count in tokens:
        assert path_costs.replay[count] == pytest.approx(float(curve(count)))
        assert path_costs.exact_curve.at(count) == pytest.approx(float(curve(count)))


def test_budgets_are_kept_where_a_replay_gains() -> None:
    costs = BatchCosts(rising({100: 1.0, 200: 2.0}), rising({100: 2.0, 200: 2.04}))
    assert costs.keeps(np.array([50, 100, 150, 200])).tolist() == [True, True, True, False]
    measured = MeasuredCosts(replay_ms={100: 1.0, 200: 2.0}, exact_ms={100: 9.0}, not_kept_from=150)
    assert measured.curves().keeps(np.array([100, 150, 200])).tolist() == [True, False, False]

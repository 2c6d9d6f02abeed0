from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.costs import CostCurve, PathCosts, PathTable

REPLAY = {64: 1.72, 256: 3.47}


def table(
    path_costs: PathCosts,
    budgets: tuple[int, ...] = tuple(REPLAY),
    *,
    largest: int = 256,
    skippable: bool = False,
) -> PathTable:
    return path_costs.table(budgets, largest, skippable)


def test_fallbacks_are_linear_between_and_beyond_their_points() -> None:
    path_costs = PathCosts(exact=((10, 2.0), (20, 4.0), (40, 5.0)), eager=((30, 3.0),))
    costs = table(path_costs, (), largest=60)
    assert costs.predicts_fallbacks
    assert costs.fallback(5) == (2.0, False)
    assert costs.fallback(15) == (3.0, False)
    assert costs.fallback(30) == (3.0, True)
    assert costs.fallback(60) == (6.0, False), "eager in proportion: 6.0, so neither is faster"
    assert costs.fallback(100) == (8.0, False), "above the table: the last slope, 1 ms a 20 tokens"
    assert costs.fallback(20) == (3.0, True)
    assert CostCurve(((10, 5.0), (20, 4.0))).at(90) == 4.0, "a slope of noise leads to no negative times"


def test_unmeasured_costs_prefer_replays_and_little_padding() -> None:
    path_costs = PathCosts.unmeasured((64, 128), {64: 2})
    costs = table(path_costs, (64, 128), largest=128)
    assert not path_costs.measured
    assert not costs.predicts_fallbacks
    assert costs.replay(64, 1) == (64, 128.0)
    assert costs.replay(64, 3) == (128, 192.0)
    one, both = costs.fallback(64)[0], costs.fallback(128)[0]
    assert one > 64 * 192.0, "however an item is replayed, that is cheaper"
    assert one < both < 2 * one, "what has to fall back does so together"


def test_a_batch_without_tokens_is_skipped_or_a_replay_of_padding() -> None:
    path_costs = PathCosts(REPLAY, exact=((1, 0.1),))
    assert table(path_costs, skippable=True).costs(np.array([0, 1])).tolist() == [0.0, 0.1]
    assert table(path_costs).costs(np.array([0])).tolist() == [1.72]
    assert table(path_costs, skippable=True).costs(
        np.array([0, 1]), np.array([9, 9]), np.array([False, False])
    ).tolist() == [0.0, 0.1]


@pytest.mark.parametrize("points", [((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0)), ((0, 1.0),)])
def test_points_must_increase(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(InputError, match="eager: the tokens of its points must be positive and increase"):
        PathCosts(eager=points)


prices = st.dictionaries(st.integers(1, 60), st.floats(0.1, 50), max_size=6)


@given(prices, prices, st.dictionaries(st.integers(1, 60), st.integers(1, 9), max_size=4), st.data())
def test_tables_agree_with_single_look_ups(
    replay: dict[int, float], exact: dict[int, float], max_segments: dict[int, int], data: st.DataObject
) -> None:
    path_costs = PathCosts(replay, data.draw(prices), tuple(sorted(exact.items())), max_segments=max_segments)
    costs = table(path_costs, tuple(sorted(replay)), largest=60)
    tokens = data.draw(st.lists(st.integers(1, 70), min_size=1))
    segments = data.draw(st.lists(st.integers(1, 12), min_size=len(tokens), max_size=len(tokens)))
    replayable = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))

    def single(count: int, of_segments: int | None, may_replay: bool) -> float:
        if count > 60:
            return np.inf
        found = costs.replay(count, of_segments) if may_replay else None
        return min(costs.fallback(count)[0], found[1] if found else np.inf)

    assert costs.costs(np.array(tokens)).tolist() == [single(t, None, True) for t in tokens]
    several = [max(count, 2) for count in segments]
    assert costs.costs(np.array(tokens), np.array(several), np.array(replayable)).tolist() == [
        single(*row) for row in zip(tokens, several, replayable, strict=True)
    ]
    assert costs.costs(np.array(tokens), np.ones(len(tokens), dtype=np.int64), one_segment=True).tolist() == [
        single(t, 1, True) for t in tokens
    ]
    # A cheaper choice than the answer does not exist.
    for count, of_segments in zip(tokens, segments, strict=True):
        prices_of = path_costs.one_segment if of_segments == 1 else {}
        last_too_small = max(
            (b for b, held in max_segments.items() if b in replay and held < of_segments), default=0
        )
        usable = [b for b in replay if b >= count and b > last_too_small]
        found = costs.replay(count, of_segments)
        assert (found is None) == (not usable)
        if found is not None:
            assert found[1] == min(prices_of.get(b, replay[b]) for b in usable)


@given(
    st.dictionaries(st.integers(0, 60), st.floats(0.1, 50), max_size=5),
    st.lists(st.integers(0, 90), min_size=1),
)
def test_a_curve_is_the_same_one_by_one_and_all_at_once(points: dict[int, float], tokens: list[int]) -> None:
    curve = CostCurve(tuple(sorted(points.items())))
    assert curve(tokens).tolist() == [curve.at(count) for count in tokens]
    for count, cost in points.items():
        assert curve.at(count) == cost
    if points:
        ordered = sorted(points)
        between = [count for count in tokens if ordered[0] <= count <= ordered[-1]]
        expected = np.interp(between, ordered, [points[count] for count in ordered])
        assert curve(between) == pytest.approx(expected)
        assert all(curve.at(count) == points[ordered[0]] for count in range(ordered[0]))
    else:
        assert np.isinf(curve(tokens)).all()

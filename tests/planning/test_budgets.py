import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.limits import default_budgets, generate_budgets, smallest_fitting

budget_lists = st.lists(st.integers(1, 5000), min_size=1, max_size=8, unique=True).map(sorted)


@pytest.mark.parametrize(
    ("minimum", "maximum", "expected"),
    [
        (64, 512, [64, 128, 256, 512]),
        (64, 500, [64, 128, 256, 500]),
        (64, 65, [64, 65]),
        (64, 64, [64]),
        (1, 1, [1]),
        (272, 13824, [272, 544, 1088, 2176, 4352, 8704, 13824]),
    ],
)
def test_budgets_double_and_end_at_the_maximum(minimum: int, maximum: int, expected: list[int]) -> None:
    assert generate_budgets(minimum, maximum) == expected


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_generated_budgets_are_increasing_and_never_more_than_double(minimum: int, extra: int) -> None:
    budgets = generate_budgets(minimum, minimum + extra)
    assert (budgets[0], budgets[-1]) == (minimum, minimum + extra)
    assert budgets == sorted(set(budgets))
    assert all(budget == minimum << power for power, budget in enumerate(budgets[:-1]))
    assert all(larger <= 2 * smaller for smaller, larger in itertools.pairwise(budgets))


@pytest.mark.parametrize(
    ("minimum", "maximum", "tile", "expected"),
    [
        (64, 200, 1, [64, 80, 96, 112, 128, 160, 192, 200]),
        (272, 1700, 272, [272, 544, 816, 1088, 1360, 1632, 1700]),
        (544, 1632, 272, [544, 816, 1088, 1360, 1632]),
        (8, 30, 1, [8, 10, 12, 14, 16, 20, 24, 28, 30]),
        (64, 64, 1, [64]),
        (1, 3, 1, [1, 2, 3]),
    ],
)
def test_default_budgets_lie_between_powers_too(
    minimum: int, maximum: int, tile: int, expected: list[int]
) -> None:
    assert default_budgets(minimum, maximum, tile) == expected


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_default_budgets_of_tiles_hold_whole_ones(tile: int, extra: int) -> None:
    budgets = default_budgets(tile, tile + extra, tile)
    assert (budgets[0], budgets[-1]) == (tile, tile + extra)
    assert budgets == sorted(set(budgets))
    assert set(generate_budgets(tile, tile + extra)) <= set(budgets)
    assert all(budget % tile == 0 for budget in budgets[:-1])
    assert all(4 * larger <= 5 * smaller for smaller, larger in itertools.pairwise(budgets[3:]))


@given(st.integers(4, 10**6), st.integers(0, 10**6))
def test_default_budgets_of_any_size_grow_by_a_quarter_at_most(minimum: int, extra: int) -> None:
    budgets = default_budgets(minimum, minimum + extra)
    assert budgets == sorted(set(budgets))
    # A quarter of less than 4 is rounded.
    assert all(larger <= 5 * smaller / 4 + 1 for smaller, larger in itertools.pairwise(budgets))


def test_default_budgets_quarter_the_padding_of_uniform_sizes() -> None:
    def padding(budgets: list[int]) -> tuple[float, float]:
        sizes = range(2**14 + 1, 2**15 + 1)
        replayed = [smallest_fitting(budgets, size) or 0 for size in sizes]
        return sum(replayed) - sum(sizes), sum(replayed)

    powers, finer = padding(generate_budgets(64, 2**16)), padding(default_budgets(64, 2**16))
    assert powers[0] / powers[1] == pytest.approx(1 / 4, rel=1e-3)
    assert finer[0] / finer[1] == pytest.approx(1 / 13, rel=1e-3)
    assert finer[0] / powers[0] == pytest.approx(1 / 4, rel=1e-3)


@pytest.mark.parametrize(("minimum", "maximum"), [(0, 8), (-1, 8), (9, 8)])
def test_impossible_ranges_are_refused(minimum: int, maximum: int) -> None:
    with pytest.raises(InputError, match=f"got minimum {minimum}, maximum {maximum}"):
        generate_budgets(minimum, maximum)
    with pytest.raises(InputError, match=f"got minimum {minimum}, maximum {maximum}"):
        default_budgets(minimum, maximum)


@given(budget_lists, st.integers(0, 6000))
def test_smallest_fitting_agrees_with_a_search(budgets: list[int], tokens: int) -> None:
    assert smallest_fitting(budgets, tokens) == next((b for b in budgets if b >= tokens), None)

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.packing import pack_greedy
from fxsplit_encoder.planning.plan import Capacity, Item, Loads
from fxsplit_encoder.protocol import EncoderItemSpec


def item(tokens: Mapping[str, int], frames: int = 0) -> Item:
    return Item(EncoderItemSpec(1, sum(tokens.values()), dict(tokens)), frames)


def pack_paths(
    tokens: Sequence[Mapping[str, int]],
    maxima: Mapping[str, int],
    max_items: int = 8,
    budgets: Mapping[str, Sequence[int]] | None = None,
) -> list[list[int]]:
    return pack_greedy(Loads([item(each) for each in tokens], maxima), Capacity(maxima, max_items), budgets)


def test_the_number_of_segments_is_limited() -> None:
    video, image = Item(EncoderItemSpec(4, 1), 3, 3), Item(EncoderItemSpec(8, 2))
    loads = Loads([video, image, image], ["default"])
    assert pack_greedy(loads, Capacity({"default": 100}, 8, 8, 4)) == [[0, 1], [2]]
    assert pack_greedy(loads, Capacity({"default": 100}, 8, 8)) == [[0, 1, 2]]


def test_a_batch_has_room_for_an_item() -> None:
    with pytest.raises(InputError, match="max_items must be at least 1; got 0"):
        pack_paths([{"a": 1}], {"a": 100}, 0)


items = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 5)), max_size=30)


@given(items, st.integers(1, 100), st.integers(1, 100), st.integers(1, 6), st.integers(0, 10))
def test_batches_keep_every_limit_and_are_as_full_as_next_fit_makes_them(
    items: list[tuple[int, int, int]], max_a: int, max_b: int, max_items: int, max_frames: int
) -> None:
    totals = [a + b for a, b, _ in items]
    loads = Loads([item({"a": a, "b": b}, frames) for a, b, frames in items], "ab")
    batches = pack_greedy(loads, Capacity({"a": max_a, "b": max_b}, max_items, max_frames))

    def fits(batch: list[int]) -> bool:
        a, b, frames = (sum(items[i][axis] for i in batch) for axis in range(3))
        return a <= max_a and b <= max_b and frames <= max_frames and len(batch) <= max_items

    assert sorted(index for batch in batches for index in batch) == list(range(len(items)))
    assert all(fits(batch) or len(batch) == 1 for batch in batches)
    assert all(batch == sorted(batch, key=lambda i: (totals[i], i)) for batch in batches)
    fitting = [batch for batch in batches if fits(batch)]
    for batch, following in itertools.pairwise(fitting):
        assert not fits([*batch, following[0]])


def pack_by_the_rule(
    items: list[tuple[int, int]], budgets: tuple[list[int], list[int]], max_items: int, defer: bool
) -> list[list[int]]:
    """The rules, written down word by word: a batch is a list of items, looked at as a whole each time."""

    def budget(path: int, batch: list[int]) -> int:
        return next(b for b in budgets[path] if b >= sum(items[i][path] for i in batch))

    def fits(batch: list[int]) -> bool:
        return len(batch) <= max_items and all(
            sum(items[i][path] for i in batch) <= budgets[path][-1] for path in (0, 1)
        )

    def defers(batch: list[int], item: int) -> bool:
        for path in (0, 1):
            if items[item][path] == 0:
                continue
            current, alone = budget(path, batch), budget(path, [item])
            if current + alone < budget(path, [*batch, item]) and alone >= current:
                return True
        return False

    batches: list[list[int]] = []
    oversize = []
    for item in sorted(range(len(items)), key=lambda i: sum(items[i])):
        if not fits([item]):
            oversize.append([item])
        elif batches and fits([*batches[-1], item]) and not (defer and defers(batches[-1], item)):
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches + oversize


ladders = st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(sorted)


@given(
    st.lists(st.tuples(st.integers(0, 45), st.integers(0, 45)), max_size=12),
    st.tuples(ladders, ladders),
    st.integers(1, 6),
    st.booleans(),
)
def test_packing_smallest_first_and_deferring_follow_their_rules(
    items: list[tuple[int, int]], budgets: tuple[list[int], list[int]], max_items: int, defer: bool
) -> None:
    packed = pack_paths(
        [{"a": a, "b": b} for a, b in items],
        {"a": budgets[0][-1], "b": budgets[1][-1]},
        max_items,
        {"a": budgets[0], "b": budgets[1]} if defer else None,
    )
    assert packed == pack_by_the_rule(items, budgets, max_items, defer)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.connector.interfaces import Modality
from fxsplit_encoder.connector.positions import Placeholder, PositionMap, Run
from fxsplit_encoder.errors import InputError

IMAGE, VIDEO, BEGIN, END = 900, 901, 800, 801
TOKENS: dict[Modality, Placeholder | int] = {"image": Placeholder(IMAGE, BEGIN, END), "video": VIDEO}
PROMPT = [1, 2, BEGIN, IMAGE, END, 3, BEGIN, IMAGE, END, 4]


def test_single_placeholders_become_as_many_tokens_as_their_items_have_rows() -> None:
    prompt = PositionMap(PROMPT, ["image", "image"], TOKENS)
    assert prompt.merged_length([3, 2]) == 13
    assert prompt.runs([3, 2], 0, 13) == [Run(0, 0, 3, 3), Run(1, 0, 9, 2)]
    expanded = [1, 2, BEGIN, *[IMAGE] * 3, END, 3, BEGIN, *[IMAGE] * 2, END, 4]
    assert prompt.token_ids([3, 2]).tolist() == expanded
    again = PositionMap(expanded, ["image", "image"], TOKENS)
    assert again.runs([3, 2], 0, 13) == prompt.runs([3, 2], 0, 13)


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 3, []),
        (0, 4, [Run(0, 0, 3, 1)]),
        (4, 10, [Run(0, 1, 4, 2), Run(1, 0, 9, 1)]),
        (5, 6, [Run(0, 2, 5, 1)]),
        (6, 9, []),
        (10, 99, [Run(1, 1, 10, 1)]),
        (5, 5, []),
        (8, 3, []),
    ],
)
def test_a_chunk_has_the_parts_of_runs_inside_it(start: int, stop: int, expected: list[Run]) -> None:
    assert PositionMap(PROMPT, ["image", "image"], TOKENS).runs([3, 2], start, stop) == expected


def test_adjacent_items_share_expanded_tokens_by_their_counts() -> None:
    prompt = PositionMap([1, *[IMAGE] * 5, 2], ["image", "image"], TOKENS)
    assert prompt.runs([2, 3], 0, 7) == [Run(0, 0, 1, 2), Run(1, 0, 3, 3)]
    assert prompt.runs([4, 1], 0, 7) == [Run(0, 0, 1, 4), Run(1, 0, 5, 1)]
    neighbors = PositionMap([IMAGE, IMAGE], ["image", "image"], TOKENS)
    assert neighbors.runs([2, 2], 0, 4) == [Run(0, 0, 0, 2), Run(1, 0, 2, 2)]


def test_a_videos_frames_may_have_text_between_them() -> None:
    frame = [7, VIDEO, VIDEO]
    prompt = PositionMap([*frame, IMAGE, *frame, *frame, 8], ["video", "image"], TOKENS)
    assert prompt.runs([6, 3], 0, 99) == [
        Run(0, 0, 1, 2),
        Run(1, 0, 3, 3),
        Run(0, 2, 7, 2),
        Run(0, 4, 10, 2),
    ]
    assert prompt.runs([6, 3], 8, 11) == [Run(0, 3, 8, 1), Run(0, 4, 10, 1)]


@pytest.mark.parametrize(
    ("tokens", "modalities", "counts", "message"),
    [
        ([IMAGE] * 54, ["image"], [49], "expected 1 image tokens, one for each item, or 49, .*; got 54"),
        ([IMAGE], ["image", "image"], [1, 2], "expected 2 image tokens, .* or 3, .*; got 1"),
        ([1], ["image"], [3], "expected 1 image tokens, .* or 3, .*; got 0"),
        ([IMAGE, VIDEO], ["image"], [3], "expected 0 video tokens, .*; got 1"),
        ([IMAGE, IMAGE], ["image", "video"], [2, 2], "expected 1 video tokens"),
        ([IMAGE], ["image"], [1, 1], "token_counts: expected 1 of at least 0"),
        ([IMAGE], ["image"], [-1], "token_counts: expected 1 of at least 0"),
    ],
)
def test_a_count_that_does_not_match_is_an_error(
    tokens: list[int], modalities: list[Any], counts: list[int], message: str
) -> None:
    prompt = PositionMap(tokens, modalities, TOKENS)
    for ask in (prompt.merged_length, lambda counts: prompt.runs(counts, 0, 9), prompt.token_ids):
        with pytest.raises(InputError, match=message):
            ask(counts)
    with pytest.raises(InputError, match=message):
        PositionMap(tokens, modalities, TOKENS, counts)


def test_every_modality_has_a_token_of_its_own() -> None:
    with pytest.raises(InputError, match="expected a token of its own for each of image, video"):
        PositionMap([IMAGE], ["video"], {"image": IMAGE})
    with pytest.raises(InputError, match="expected a token of its own for each of image, video"):
        PositionMap([IMAGE], ["image"], {"image": IMAGE, "video": IMAGE})
    with pytest.raises(InputError, match=r"token_ids: expected one prompt; got the shape \(1, 1\)"):
        PositionMap([[IMAGE]], ["image"], {"image": IMAGE})


def test_items_without_rows_are_left_out_with_the_tokens_around_them() -> None:
    single = PositionMap(PROMPT, ["image", "image"], TOKENS)
    assert single.token_ids([0, 2]).tolist() == [1, 2, 3, BEGIN, IMAGE, IMAGE, END, 4]
    assert single.runs([0, 2], 0, 99) == [Run(1, 0, 4, 2)]
    assert single.token_ids([0, 0]).tolist() == [1, 2, 3, 4]
    expanded = PositionMap(single.token_ids([3, 2]), ["image", "image"], TOKENS)
    assert expanded.token_ids([0, 0]).tolist() == [1, 2, 3, 4]
    with pytest.raises(InputError, match="got 5"):
        expanded.token_ids([0, 2])
    known = PositionMap(single.token_ids([3, 2]), ["image", "image"], TOKENS, [3, 2])
    assert known.token_ids([0, 2]).tolist() == single.token_ids([0, 2]).tolist()


def test_a_reduced_item_has_fewer_tokens_where_it_was_expanded() -> None:
    tokens = [1, *[IMAGE] * 4, *[IMAGE] * 3, 2]
    known = PositionMap(tokens, ["image", "image"], TOKENS, [4, 3])
    assert known.token_ids([2, 3]).tolist() == [1, *[IMAGE] * 5, 2]
    assert known.runs([2, 3], 0, 9) == [Run(0, 0, 1, 2), Run(1, 0, 3, 3)]
    assert known.runs([4, 5], 0, 99) == [Run(0, 0, 1, 4), Run(1, 0, 5, 5)]
    apart = PositionMap([VIDEO, 1, VIDEO, VIDEO], ["video"], TOKENS, [3])
    with pytest.raises(InputError, match="video 0 has 2 rows where the prompt was expanded for 3"):
        apart.runs([2], 0, 9)
    assert apart.token_ids([0]).tolist() == [1]


prompts = st.lists(
    st.one_of(
        st.just(("text", 0)),
        st.tuples(st.just("image"), st.integers(1, 4)),
        st.tuples(st.just("video"), st.integers(1, 6)),
    ),
    max_size=9,
)


def slowly(tokens: list[int], counts: dict[str, list[int]], order: list[str]) -> list[tuple[int, int] | None]:
    """Which row of which item is at every position, token by token."""
    numbers = {kind: [i for i, own in enumerate(order) if own == kind] for kind in ("image", "video")}
    rows = {
        token: iter([(i, row) for i, n in zip(numbers[kind], counts[kind], strict=True) for row in range(n)])
        for kind, token in (("image", IMAGE), ("video", VIDEO))
    }
    return [next(rows[token]) if token in rows else None for token in tokens]


@settings(max_examples=80)
@given(prompts, st.booleans(), st.data())
def test_every_row_is_where_a_walk_over_the_tokens_puts_it(
    parts: list[tuple[str, int]], single: bool, data: st.DataObject
) -> None:
    order: list[Any] = [kind for kind, _ in parts if kind != "text"]
    counts = [count for kind, count in parts if kind != "text"]
    expanded: list[int] = []
    for kind, count in parts:
        expanded += [5] if kind == "text" else [IMAGE if kind == "image" else VIDEO] * count
    tokens = expanded
    if single:
        tokens = [{"text": 5, "image": IMAGE, "video": VIDEO}[kind] for kind, _ in parts]
    by_kind = {kind: [c for k, c in parts if k == kind] for kind in ("image", "video")}
    expected = slowly(expanded, by_kind, order)
    prompt = PositionMap(tokens, order, TOKENS)
    assert prompt.token_ids(counts).tolist() == expanded
    start = data.draw(st.integers(0, len(expanded)))
    stop = data.draw(st.integers(start, len(expanded)))
    got: list[tuple[int, int] | None] = [None] * (stop - start)
    for item, row, position, length in prompt.runs(counts, start, stop):
        for step in range(length):
            got[position + step - start] = (item, row + step)
    assert got == expected[start:stop]


def test_a_map_of_many_tokens_is_made_once() -> None:
    prompt = PositionMap(np.full(100_000, IMAGE), ["image"] * 10, {"image": IMAGE})
    counts = [10_000] * 10
    first = prompt._layout(counts)
    assert [prompt.runs(counts, i * 512, (i + 1) * 512)[0].position for i in range(190)] == [
        512 * i for i in range(190)
    ]
    assert prompt._layout(counts) is first

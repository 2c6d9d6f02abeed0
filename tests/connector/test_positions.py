"""Where media are in a prompt, and their rows merged into its embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.connector.interfaces import Modality
from fxsplit_encoder.connector.positions import Placeholder, Places, PositionMap, merge_rows
from fxsplit_encoder.errors import InputError

IMAGE, VIDEO, BEGIN, END = 900, 901, 800, 801
TOKENS: dict[Modality, Placeholder | int] = {"image": Placeholder(IMAGE, BEGIN, END), "video": VIDEO}
PROMPT = [1, 2, BEGIN, IMAGE, END, 3, BEGIN, IMAGE, END, 4]


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
    for ask in (prompt.merged_length, lambda counts: prompt.places(counts, 0, 9), prompt.token_ids):
        with pytest.raises(InputError, match=message):
            ask(counts)
    with pytest.raises(InputError, match=message):
        PositionMap(tokens, modalities, TOKENS, counts)


@pytest.mark.parametrize("counts", [(6, 4), (1, 9), (5, 5)])
def test_a_prompt_expanded_for_other_lengths_of_the_same_sum_is_refused(counts: tuple[int, int]) -> None:
    tokens = [BEGIN, *[IMAGE] * 4, END, BEGIN, *[IMAGE] * 6, END]
    prompt = PositionMap(tokens, ["image", "image"], TOKENS)
    assert prompt.merged_length((4, 6)) == len(tokens)
    with pytest.raises(InputError, match="image 1 would begin among neighboring tokens"):
        prompt.merged_length(counts)


def test_every_modality_has_a_token_of_its_own() -> None:
    with pytest.raises(InputError, match="expected a token of its own for each of image, video"):
        PositionMap([IMAGE], ["video"], {"image": IMAGE})
    with pytest.raises(InputError, match="expected a token of its own for each of image, video"):
        PositionMap([IMAGE], ["image"], {"image": IMAGE, "video": IMAGE})
    with pytest.raises(InputError, match=r"token_ids: expected one prompt; got the shape \(1, 1\)"):
        PositionMap([[IMAGE]], ["image"], {"image": IMAGE})


def walked(places: Places) -> list[tuple[int, int, int]]:
    """Item, row and position of each row."""
    rows = [(item, row) for item, first, stop in places.pieces for row in range(first, stop)]
    return [(*row, where) for row, where in zip(rows, places.positions.tolist(), strict=True)]


def test_items_without_rows_are_left_out_with_the_tokens_around_them() -> None:
    single = PositionMap(PROMPT, ["image", "image"], TOKENS)
    assert single.token_ids([0, 2]).tolist() == [1, 2, 3, BEGIN, IMAGE, IMAGE, END, 4]
    assert walked(single.places([0, 2], 0, 99)) == [(1, 0, 4), (1, 1, 5)]
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
    assert known.places([2, 3], 0, 9).pieces == [(0, 0, 2), (1, 0, 3)]
    assert known.places([4, 5], 0, 99).pieces == [(0, 0, 4), (1, 0, 5)]
    apart = PositionMap([VIDEO, 1, VIDEO, VIDEO], ["video"], TOKENS, [3])
    with pytest.raises(InputError, match="video 0 has 2 rows where the prompt was expanded for 3"):
        apart.places([2], 0, 9)
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
    assert (prompt.token_ids(counts).tolist(), prompt.merged_length(counts)) == (expanded, len(expanded))
    start, stop = (data.draw(st.integers(0, len(expanded) + 3)) for _ in range(2))
    got: list[tuple[int, int] | None] = [None] * len(expanded[start:stop])
    for item, row, position in walked(prompt.places(counts, start, stop)):
        got[position] = (item, row)
    assert got == expected[start:stop]


WIDTH = 6


def features(counts: Sequence[int], levels: int = 0, width: int = WIDTH) -> list[Tensor]:
    """Each value says whose it is: item, row, column."""
    made = []
    for item, count in enumerate(counts):
        rows, columns = torch.meshgrid(torch.arange(count), torch.arange(width * (1 + levels)), indexing="ij")
        made.append((10_000 * item + 100 * rows + columns).float())
    return made


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@settings(max_examples=150)
@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    gaps=st.lists(st.integers(0, 2), min_size=60, max_size=60),
    levels=st.integers(0, 2),
    size=st.integers(1, 40),
    width=st.sampled_from([5, 6, 8]),  # of words or not
    dtype=dtypes,
    row_dtype=dtypes,
    shift=st.integers(0, 1),
)
def test_chunks_put_every_row_where_it_belongs(
    counts: list[int],
    gaps: list[int],
    levels: int,
    size: int,
    width: int,
    dtype: torch.dtype,
    row_dtype: torch.dtype,
    shift: int,
) -> None:
    """Converted to the embeddings' dtype, in any part of a tensor; levels outlast the rows."""
    # Text between any two tokens of an item, so that some have many runs; and between items.
    firsts = {sum(counts[:item]) for item in range(1, len(counts))}
    gaps = [max(gap, row in firsts) for row, gap in enumerate(gaps[: sum(counts)])]
    tokens = [token for gap in gaps for token in [5] * gap + [9]]
    prompt = PositionMap(tokens, ["image"] * len(counts), {"image": 9})
    all_rows = torch.cat(features(counts, levels, width)).to(row_dtype).to(dtype)
    where = torch.tensor([i for i, token in enumerate(tokens) if token == 9])
    for start in range(0, len(tokens), size):
        stop = min(start + size, len(tokens))
        rows = [each.to(row_dtype) for each in features(counts, levels, width)]
        whole = torch.full((1 + stop - start, width + 3), -1.0, dtype=dtype)
        expected = whole.clone()
        out = whole[shift : shift + stop - start, shift : shift + width]
        merged = merge_rows(dict(enumerate(rows)), prompt.places(counts, start, stop), out, levels)
        for each in rows:
            each.fill_(-7)
        inside = (where >= start) & (where < stop)
        assert torch.equal(merged.positions, where[inside] - start)
        expected[merged.positions + shift, shift : shift + width] = all_rows[inside, :width]
        assert torch.equal(whole, expected)
        further = all_rows[inside, width:].unflatten(1, (levels, width)).transpose(0, 1)
        assert torch.equal(merged.levels, further) and merged.levels.dtype == dtype


def test_embeddings_that_autograd_watches_are_written_too() -> None:
    weight = torch.ones(1, 8, requires_grad=True)
    out = weight.expand(4, 8) * 1
    places = PositionMap([9, 5, 9, 5], ["image"], {"image": 9}).places([2], 0, 4)
    merge_rows({0: torch.zeros(2, 8)}, places, out)
    out.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((1, 8), 2.0))

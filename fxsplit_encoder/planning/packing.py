"""Which items share a replay, by the greedy rules."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.budgets import smallest_fitting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def pack_greedy(
    item_tokens: Sequence[Mapping[str, int]],
    totals: Sequence[int],
    path_maxima: Mapping[str, int],
    max_items: int,
    item_frames: Sequence[int] | None = None,
    max_frames: int = 0,
    item_segments: Sequence[int] | None = None,
    max_segments: int = 0,
    defer_budgets: Mapping[str, Sequence[int]] | None = None,
) -> list[list[int]]:
    """Next-fit in ascending order: a batch grows until the next item would exceed a limit.

    Items of equal size keep their order. An item that exceeds a limit by itself is a batch of its own, after
    all others.

    Args:
        item_tokens: the output tokens of every item on each path; a path that is left out has none.
        totals: the output tokens of every item over all paths, by which they are ordered.
        path_maxima: the output tokens that a batch may have on each path.
        max_items: the items that a batch may have.
        item_frames: the video frames of every item, 0 for an image; None: frames are not limited.
        max_frames: the video frames that a batch may have.
        item_segments: the attention segments of every item; None: segments are not limited.
        max_segments: the attention segments that a batch may have.
        defer_budgets: the increasing budgets of each path, the last at least its maximum. If given, an item
            starts the next batch although it fits, where that lowers the sum of budgets on some path: the
            budget of the batch so far and that of the item alone are together below the budget of both, and
            the item's is not the smaller one (the rule of vLLM 0.33).

    Returns:
        The positions of the items of every batch, each position once.

    Raises:
        InputError: the sequences differ in length, or `max_items` is not positive.
    """
    frames = [0] * len(totals) if item_frames is None else item_frames
    segments = [0] * len(totals) if item_segments is None else item_segments
    check_items(max_items, len(item_tokens), len(totals), len(frames), len(segments))

    # An item is a vector of what it takes up: its tokens on each path, itself, its frames, its segments.
    capacity = (*path_maxima.values(), max_items, max_frames, max_segments)
    deferring = [
        (position, defer_budgets[path])
        for position, path in enumerate(path_maxima)
        if defer_budgets is not None and defer_budgets[path]
    ]
    batches: list[list[int]] = []
    oversize: list[list[int]] = []
    growing: list[int] = []
    load = [0] * len(capacity)
    for index in sorted(range(len(totals)), key=totals.__getitem__):
        item = [*(item_tokens[index].get(path, 0) for path in path_maxima), 1, frames[index], segments[index]]
        merged = list(map(operator.add, load, item))
        deferred = growing and any(_defers(budgets, load[i], item[i]) for i, budgets in deferring)
        if _fits(merged, capacity) and not deferred:
            growing.append(index)
            load = merged
        elif _fits(item, capacity):
            batches.append(growing)
            growing, load = [index], item
        else:
            oversize.append([index])
    return [*batches, *([growing] if growing else []), *oversize]


def check_items(max_items: int, *lengths: int) -> None:
    """Raises InputError unless all sequences have one length, and a batch may have an item."""
    if len(set(lengths)) > 1:
        raise InputError(
            f"tokens, totals, frames and segments must have one entry an item; got {lengths} entries"
        )
    if max_items < 1:
        raise InputError(f"max_items must be at least 1; got {max_items}")


def _fits(load: Sequence[int], capacity: Sequence[int]) -> bool:
    return all(map(operator.le, load, capacity))


def _defers(budgets: Sequence[int], load: int, tokens: int) -> bool:
    merged = smallest_fitting(budgets, load + tokens)
    if tokens == 0 or merged is None:
        return False
    current, alone = smallest_fitting(budgets, load), smallest_fitting(budgets, tokens)
    assert current is not None, "a batch has outgrown the budgets"
    assert alone is not None, "an item that fits has no budget"
    return current + alone < merged and alone >= current

"""Which items share a replay, by the greedy rules."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.budgets import smallest_fitting
from fxsplit_encoder.planning.items import Capacity, Loads


def pack_greedy(
    loads: Loads, capacity: Capacity, defer_budgets: Mapping[str, Sequence[int]] | None = None
) -> list[list[int]]:
    """Next-fit in ascending order: a batch grows until the next item would exceed a limit.

    Items are ordered by their tokens over all paths; those of equal size keep their order. An item that
    exceeds a limit by itself is a batch of its own, after all others.

    Args:
        loads: what the items take up.
        capacity: what a batch may have.
        defer_budgets: the increasing budgets of each path, the last at least its maximum. If given, an item
            starts the next batch although it fits, where that lowers the sum of budgets on some path: the
            budget of the batch so far and that of the item alone are together below the budget of both, and
            the item's is not the smaller one (the rule of vLLM 0.33).

    Returns:
        The positions of the items of every batch, each position once.

    Raises:
        InputError: a batch may not have any items.
    """
    check_capacity(capacity)
    # An item is a vector of what it takes up: its tokens on each path, itself, its frames, its segments.
    limits = [*capacity.tokens.values(), capacity.max_items, capacity.max_frames]
    columns = [*(loads.tokens[path] for path in capacity.tokens), [1] * len(loads), loads.frames]
    if capacity.max_segments is not None:
        limits.append(capacity.max_segments)
        columns.append(loads.segments)
    vectors = list(zip(*columns, strict=True))
    deferring = [
        (position, defer_budgets[path])
        for position, path in enumerate(capacity.tokens)
        if defer_budgets is not None and defer_budgets[path]
    ]
    batches: list[list[int]] = []
    oversize: list[list[int]] = []
    growing: list[int] = []
    load: Sequence[int] = [0] * len(limits)
    for index in sorted(range(len(loads)), key=loads.totals.__getitem__):
        item = vectors[index]
        merged = list(map(operator.add, load, item))
        deferred = growing and any(_defers(budgets, load[i], item[i]) for i, budgets in deferring)
        if _fits(merged, limits) and not deferred:
            growing.append(index)
            load = merged
        elif _fits(item, limits):
            batches.append(growing)
            growing, load = [index], item
        else:
            oversize.append([index])
    return [*batches, *([growing] if growing else []), *oversize]


def check_capacity(capacity: Capacity) -> None:
    """Raises InputError unless a batch may have an item."""
    if capacity.max_items < 1:
        raise InputError(f"max_items must be at least 1; got {capacity.max_items}")


def _fits(load: Sequence[int], limits: Sequence[int]) -> bool:
    return all(map(operator.le, load, limits))


def _defers(budgets: Sequence[int], load: int, tokens: int) -> bool:
    merged = smallest_fitting(budgets, load + tokens)
    if tokens == 0 or merged is None:
        return False
    current, alone = smallest_fitting(budgets, load), smallest_fitting(budgets, tokens)
    assert current is not None, "a batch has outgrown the budgets"
    assert alone is not None, "an item that fits has no budget"
    return current + alone < merged and alone >= current

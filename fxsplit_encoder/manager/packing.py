"""Which items share a replay."""

import operator
from collections.abc import Mapping, Sequence

from fxsplit_encoder.errors import InputError


def pack_greedy(
    item_tokens: Sequence[Mapping[str, int]],
    totals: Sequence[int],
    path_maxima: Mapping[str, int],
    max_items: int,
    item_frames: Sequence[int] | None = None,
    max_frames: int = 0,
    item_segments: Sequence[int] | None = None,
    max_segments: int = 0,
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

    Returns:
        The positions of the items of every batch, each position once.

    Raises:
        InputError: the sequences differ in length, or `max_items` is not positive.
    """
    frames = [0] * len(totals) if item_frames is None else item_frames
    segments = [0] * len(totals) if item_segments is None else item_segments
    lengths = (len(item_tokens), len(totals), len(frames), len(segments))
    if len(set(lengths)) > 1:
        raise InputError(
            f"tokens, totals, frames and segments must have one entry an item; got {lengths} entries"
        )
    if max_items < 1:
        raise InputError(f"max_items must be at least 1; got {max_items}")

    # An item is a vector of what it takes up: itself, its frames, its segments, its tokens on each path.
    capacity = (max_items, max_frames, max_segments, *path_maxima.values())
    batches: list[list[int]] = []
    oversize: list[list[int]] = []
    growing: list[int] = []
    load = [0] * len(capacity)
    for index in sorted(range(len(totals)), key=totals.__getitem__):
        item = [1, frames[index], segments[index], *(item_tokens[index].get(path, 0) for path in path_maxima)]
        merged = list(map(operator.add, load, item))
        if _fits(merged, capacity):
            growing.append(index)
            load = merged
        elif _fits(item, capacity):
            batches.append(growing)
            growing, load = [index], item
        else:
            oversize.append([index])
    return [*batches, *([growing] if growing else []), *oversize]


def _fits(load: Sequence[int], capacity: Sequence[int]) -> bool:
    return all(map(operator.le, load, capacity))

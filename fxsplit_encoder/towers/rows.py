"""The rows of several tensors, seen as one sequence: images first, then videos."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def one_or_several(parts: list[Tensor]) -> Tensor | list[Tensor]:
    """A single tensor by itself; several as they are, whose rows follow one another."""
    return parts[0] if len(parts) == 1 else parts


def rows_of(tensors: Sequence[Tensor], starts: Sequence[int], items: Sequence[int]) -> list[Tensor]:
    """Views of the rows of some items, one for each run of neighbours.

    Args:
        tensors: the rows of all items, one tensor after another.
        starts: the first row of every item, and the number of rows.
        items: the items wanted, in this order.
    """
    spans: list[list[int]] = []
    for item in items:
        start, end = starts[item], starts[item + 1]
        if spans and spans[-1][1] == start:
            spans[-1][1] = end
        else:
            spans.append([start, end])
    parts = []
    for start, end in spans:
        offset = 0
        for tensor in tensors:
            first, last = max(start - offset, 0), min(end - offset, tensor.shape[0])
            if first < last:
                parts.append(tensor[first:last])
            offset += tensor.shape[0]
    return parts or [tensors[0][:0]]

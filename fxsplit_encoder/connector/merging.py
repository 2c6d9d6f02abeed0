"""Where the rows of items belong among the tokens of a prompt, and the copies that put them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from fxsplit_encoder.errors import InputError


class Run(NamedTuple):
    """Neighboring rows of one item that go to neighboring positions."""

    item: int
    row: int
    position: int
    """Of the first row, in the merged sequence."""
    length: int


class Placeholders(Protocol):
    """Where a prompt shows its items. Token counts are those of the ticket: an item of 0 is left out."""

    def merged_length(self, token_counts: Sequence[int]) -> int:
        """Positions of the merged sequence."""
        ...

    def runs(self, token_counts: Sequence[int], start: int, stop: int) -> Sequence[Run]:
        """What goes to the positions from `start` up to `stop`, in order.

        Raises:
            InputError: the counts are not what the prompt has placeholders for.
        """
        ...


@dataclass(frozen=True)
class PlaceholderTokens:
    """A prompt with one placeholder token for each item, which its rows replace."""

    num_tokens: int
    """Tokens of the prompt, placeholders included."""
    positions: tuple[int, ...]
    """Of the placeholders in the prompt, one for each item, rising."""

    @classmethod
    def find(cls, token_ids: Sequence[int], placeholder_ids: Sequence[int]) -> PlaceholderTokens:
        """Those of a prompt: every token that is one of `placeholder_ids`, in order."""
        wanted = set(placeholder_ids)
        return cls(len(token_ids), tuple(i for i, token in enumerate(token_ids) if token in wanted))

    def merged_length(self, token_counts: Sequence[int]) -> int:
        """Positions of the merged sequence."""
        self._check(token_counts)
        return self.num_tokens - len(self.positions) + sum(token_counts)

    def runs(self, token_counts: Sequence[int], start: int, stop: int) -> list[Run]:
        """What goes to the positions from `start` up to `stop`."""
        self._check(token_counts)
        runs, grown = [], 0
        for item, (position, count) in enumerate(zip(self.positions, token_counts, strict=True)):
            first = position + grown
            low, high = max(first, start), min(first + count, stop)
            if low < high:
                runs.append(Run(item, low - first, low, high - low))
            grown += count - 1
        return runs

    def expand(self, token_ids: Sequence[int], token_counts: Sequence[int]) -> list[int]:
        """The token at every position of the merged sequence: each placeholder as often as its item has
        rows.
        """
        self._check(token_counts)
        counts = dict(zip(self.positions, token_counts, strict=True))
        return [token for i, token in enumerate(token_ids) for _ in range(counts.get(i, 1))]

    def _check(self, token_counts: Sequence[int]) -> None:
        if len(token_counts) != len(self.positions):
            raise InputError(
                f"placeholders: expected one for each of {len(token_counts)} items; got {len(self.positions)}"
            )


def copy_rows(rows: Sequence[Tensor | None], runs: Sequence[Run], out: Tensor, start: int) -> None:
    """Copies runs to their places, without waiting for the device.

    Args:
        rows: of each item, (tokens, width); of more columns than `out` has, the first ones are taken.
        runs: what to copy.
        out: (positions, width), from position `start` on; written in place.
    """
    width = out.shape[1]
    for item, row, position, length in runs:
        source = rows[item]
        assert source is not None
        target = out[position - start : position - start + length]
        target.copy_(source[row : row + length, :width], non_blocking=True)

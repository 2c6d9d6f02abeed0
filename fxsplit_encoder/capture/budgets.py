"""Token budgets: the sizes that are captured."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from fxsplit_encoder.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence


def generate_budgets(minimum: int, maximum: int) -> list[int]:
    """Powers of two times `minimum` up to `maximum`, which is always the last: 64, 200 gives 64, 128, 200.

    Args:
        minimum: the smallest budget in output tokens.
        maximum: the largest budget in output tokens.

    Raises:
        InputError: not 1 <= minimum <= maximum.
    """
    if not 1 <= minimum <= maximum:
        raise InputError(f"budgets need 1 <= minimum <= maximum; got minimum {minimum}, maximum {maximum}")
    doublings = (maximum // minimum).bit_length()
    budgets = [minimum << power for power in range(doublings)]
    return budgets if budgets[-1] == maximum else [*budgets, maximum]


def smallest_fitting(budgets: Sequence[int], tokens: int) -> int | None:
    """The smallest of the increasing `budgets` with room for `tokens`; None if the largest is too small."""
    position = bisect.bisect_left(budgets, tokens)
    return budgets[position] if position < len(budgets) else None

"""Token budgets: the sizes that are captured."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from fxsplit_encoder.errors import InputError


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


def default_budgets(minimum: int, maximum: int, tile: int = 1) -> list[int]:
    """The ladder where none is listed: 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ... quarters of `minimum`, and
    `maximum`.

    These are the powers of two times `minimum`, and the quarters between them, rounded down, as far as they
    are multiples of `tile`.

    Let the tokens of a batch be uniform between two powers of two, M and 2M (M at least 4 tiles). Powers of
    two alone replay 2M for each, M / 2 of padding on average: 25 % of what is replayed. With 1.25, 1.5 and
    1.75 M between them the average padding is M / 8, a quarter as much, and the average budget 1.625 M:
    padding is 1/13 (7.7 %) of what is replayed. With 1.5 M alone it would be 1/7 (14.3 %).

    Args:
        minimum: the smallest budget in output tokens.
        maximum: the largest budget in output tokens.
        tile: the tokens of the smallest unit that is encoded, so that budgets hold whole ones.

    Raises:
        InputError: not 1 <= minimum <= maximum.
    """
    powers = generate_budgets(minimum, maximum)
    quarters = (power * part // 4 for power in powers for part in (5, 6, 7))
    whole = (budget for budget in quarters if budget % tile == 0 and budget < maximum)
    return sorted({*powers, *whole})


def inferred_budgets(minimum: int, maximum: int, tile: int, max_items: int) -> tuple[int, ...]:
    """The default ladder over a tower's range, whose smallest budget has a unit for each item of a batch.

    Args:
        minimum: the smallest useful budget in output tokens.
        maximum: the largest one.
        tile: as for `default_budgets`.
        max_items: the items of a batch that are configured; 0: none are.

    Raises:
        InputError: the range is empty.
    """
    for_items = -(-max_items // tile) * tile
    return tuple(default_budgets(max(minimum, for_items), maximum - maximum % tile, tile))


def smallest_fitting(budgets: Sequence[int], tokens: int) -> int | None:
    """The smallest of the increasing `budgets` that holds `tokens`; None if the largest is too small."""
    position = bisect.bisect_left(budgets, tokens)
    return budgets[position] if position < len(budgets) else None

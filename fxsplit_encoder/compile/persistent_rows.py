"""Inductor's reductions over rows as wide as a vision tower: each row is read once.

Importing this loads Inductor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

LONGEST_ROW = 4096
"""Entries of a row that stay in registers; blocks of vision towers are 768 to 3200 wide."""


class PersistentRows(InductorChoices):
    """Inductor's heuristics for Triton kernels, but longer rows of a reduction stay in registers: its own
    limit is 1024, and a longer row is read twice by every layer norm.

    Args:
        longest: entries of a row.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def uuid(self) -> str:
        """What Inductor's caches tell these choices apart by."""
        return f"{type(self).__name__}-{self.longest}"

    def should_use_persistent_reduction(self, features: Any, cooperative_reduction: bool) -> bool:  # type: ignore[override]
        """Whether a reduction keeps its rows in registers, see `InductorChoices`."""
        if super().should_use_persistent_reduction(features, cooperative_reduction):
            return True
        if cooperative_reduction or not config.triton.persistent_reductions or _is_ordered(features):
            return False
        return features.get_reduction_hint() == ReductionHint.INNER and V.graph.sizevars.statically_known_leq(
            features.reduction_numel, self.longest
        )


# What torch calls the question in which blocks a row is to be reduced: 2.14 of sums alone, and later ones.
_BLOCKS = ("strict_sum_rblock", "strict_reduction_rblock")


def _is_ordered(features: Any) -> bool:
    """Whether rows have to be reduced in blocks of a given size, which torch can ask for since 2.14."""
    asked = (getattr(features, name, None) for name in _BLOCKS)
    return any(block is not None and block() is not None for block in asked)


@contextmanager
def persistent_rows() -> Iterator[None]:
    """What is compiled within keeps rows of up to `LONGEST_ROW` entries in registers.

    Choices that someone else has set stay, and so does everything where this torch asks no such question.
    """
    asked = hasattr(InductorChoices, "should_use_persistent_reduction")
    chosen = config.inductor_choices_class is not None or type(V.choices) is not InductorChoices
    if chosen or not asked:
        yield
        return
    choices = partial(PersistentRows, LONGEST_ROW)
    # The setting is part of the key of Inductor's cache of graphs; the handler is what is asked.
    with config.patch(inductor_choices_class=choices), V.set_choices_handler(choices()):
        yield

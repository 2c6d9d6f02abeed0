"""Captures under the memory limit: made largest first over one pool, and given up where they exceed it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fxsplit_encoder.capture import GraphPool
from fxsplit_encoder.pauses import pause
from fxsplit_encoder.planning.costs import EXACT_LAUNCH_TOKENS, PathCosts
from fxsplit_encoder.runtime.captured_program import CapturedProgram


class CaptureSet:
    """The captures of several programs over one pool.

    Args:
        programs: by whatever tells them apart; more may come later.
        max_bytes: memory that captures and their static inputs may take; None: no limit.
        skippable: the programs that a batch without tokens there skips.
        agree: for forwards with collectives, whose ranks drop the same budgets: whether every rank says yes.
    """

    def __init__(
        self,
        programs: Mapping[Any, CapturedProgram],
        pool: GraphPool,
        max_bytes: int | None,
        skippable: Collection[Hashable] = (),
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self.programs = programs
        self.pool = pool
        self.max_bytes = max_bytes
        self.skippable = skippable
        self._agree = agree
        self.spare: Callable[[], None] | None = None
        """Gives back memory that something of less use holds, once a capture has found too little."""

    @property
    def num_bytes(self) -> int:
        """Memory that all captures hold: their graphs' pools and their static inputs."""
        programs = self.programs.values()
        return self.pool.used_bytes + sum(each.input_bytes + each.unpadded_bytes for each in programs)

    @property
    def remaining_bytes(self) -> int | None:
        """What the limit leaves for more; None: there is no limit."""
        return None if self.max_bytes is None else self.max_bytes - self.num_bytes

    @property
    def num_captured(self) -> int:
        """Budgets that are captured, over all programs."""
        return sum(len(each.captured) for each in self.programs.values())

    def capture(
        self,
        wanted: Iterable[tuple[Hashable, int]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Captures budgets of programs, largest first, and drops those that exceed the limit. It pauses
        between budgets, and as `BudgetLadder.capture`; nothing is replayed before the end.

        Args:
            wanted: (program's key, budget).
            progress: is called with (budgets done, budgets).
        """
        ordered = sorted(wanted, key=lambda each: -each[1])
        for done, (key, budget) in enumerate(ordered, 1):
            self._capture_one(key, budget)
            if progress is not None:
                progress(done, len(ordered))
            pause()
        while self._over_limit():
            self._drop_least_useful()

    def clear(self) -> None:
        """Releases every capture; their memory goes back to the device."""
        for program in self.programs.values():
            program.clear()
        self.pool.retire()

    def held(self) -> list[tuple[Hashable, int]]:
        """What `capture` makes of what is captured now."""
        return [(key, budget) for key, program in self.programs.items() for budget in program.captured]

    def _capture_one(self, key: Hashable, budget: int) -> None:
        program = self.programs[key]
        program.capture(budget)
        if self.spare is not None and budget in program.ladder.out_of_memory:
            spare, self.spare = self.spare, None
            spare()
            program.forget_drop(budget)
            program.capture(budget)
        captures = self.num_captured
        if captures == 1 and budget in program.captured and self._over_limit():
            program.drop(budget, f"{self._excess()}, by this one alone")
            captures = 0
        if captures == 0:  # what was tried and released left its memory in the pool
            program.shared.clear()
            self.pool.retire()

    def _over_limit(self) -> bool:
        """Whether the captures take more than they may, on this rank or another."""
        remaining = self.remaining_bytes
        return remaining is not None and not (self._agree or bool)(remaining >= 0)

    def _excess(self) -> str:
        return f"captures take {self.num_bytes} bytes, max_graph_bytes allows {self.max_bytes}"

    def _drop_least_useful(self) -> None:
        """Drops the budgets that gain least for their bytes, and captures the rest again.

        Memory of a pool is given back as a whole, so what remains has to be captured again.
        """
        assert self.max_bytes is not None
        # Bytes are not the same on all ranks: there one budget is dropped at a time.
        excess = self.num_bytes - self.max_bytes if self._agree is None else 1
        reason = self._excess()
        # Whether the last one fits by itself, capturing it again tells.
        while excess > 0 and self.num_captured > 1:
            program, budget = self._least_useful()
            excess -= max(1, program.num_bytes(budget))
            program.drop(budget, f"{reason}; it gains least for its memory")
        kept = self.held()
        for program in self.programs.values():
            program.release()
        self.pool.retire()
        for key, budget in sorted(kept, key=lambda each: -each[1]):
            self._capture_one(key, budget)
            pause()

    def _least_useful(self) -> tuple[CapturedProgram, int]:
        found = []
        for key, program in self.programs.items():
            if budgets := sorted(program.captured):
                sizes = budgets if self._agree else [program.num_bytes(budget) for budget in budgets]
                budget, gain = least_useful(program.costs, budgets, sizes, key in self.skippable)
                found.append((gain, program, budget))
        assert found, "nothing is captured, so no limit is exceeded"
        _, program, budget = min(found, key=lambda each: each[0])
        return program, budget


def least_useful(
    costs: PathCosts, budgets: Sequence[int], num_bytes: Sequence[int], skippable: bool
) -> tuple[int, float]:
    """The budget that gains least for its bytes, and that gain.

    The gain of a budget is what all sizes up to the largest budget, each as likely as another, would cost
    more without it.

    Args:
        costs: of the path. Where nothing was measured, the exact shape counts as a few hundred tokens more
            than its own, for its launches.
        skippable: as for `PathCosts.table`.
    """
    every = tuple(budgets)
    tokens = np.arange(1, every[-1] + 1)
    if not costs.measured:
        launches = EXACT_LAUNCH_TOKENS
        exact = ((1, 1.0 + launches), (every[-1] + 1, every[-1] + 1.0 + launches))
        costs = replace(costs, exact=exact)

    def total(kept: tuple[int, ...]) -> float:
        max_segments = tuple(costs.max_segments.get(budget) for budget in kept)
        return float(costs.table(kept, max_segments, every[-1], skippable).costs(tokens).mean())

    everything = total(every)
    gains = {
        budget: (total(tuple(b for b in every if b != budget)) - everything) / max(size, 1)
        for budget, size in zip(every, num_bytes, strict=True)
    }
    least = min(gains, key=gains.__getitem__)
    return least, gains[least]

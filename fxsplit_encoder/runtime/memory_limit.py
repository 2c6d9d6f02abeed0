"""Captures under the memory limit: made largest first over one pool, and given up where they exceed it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fxsplit_encoder.pauses import pause
from fxsplit_encoder.planning.costs import EXACT_LAUNCH_TOKENS, PathCosts
from fxsplit_encoder.planning.limits import CaptureKey
from fxsplit_encoder.runtime.captured_program import CapturedProgram
from fxsplit_encoder.runtime.requests import CaptureScope
from fxsplit_encoder.runtime.statistics import BudgetStats, Statistics


class CaptureSet:
    """The captures of several programs over one pool, whose memory `max_graph_bytes` limits."""

    def __init__(self, scope: CaptureScope) -> None:
        self.programs: Mapping[Any, CapturedProgram] = {}
        self.skippable: Collection[Hashable] = ()
        """Keys of the programs that a batch without tokens there skips."""
        self.pool = scope.pool
        self.max_bytes = scope.config.max_graph_bytes
        self.scope = replace(scope, remaining_bytes=lambda: self.remaining_bytes)
        self.bytes_elsewhere: Callable[[], int] = lambda: 0
        """Returns bytes of other captures under the same limit."""
        self.spare: Callable[[], None] | None = None
        """Is called once a capture found too little memory; releases captures that matter less."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all captures: their graphs' pools and their static inputs."""
        programs = self.programs.values()
        return self.pool.used_bytes + sum(each.input_bytes + each.unpadded.num_bytes for each in programs)

    @property
    def remaining_bytes(self) -> int | None:
        """Bytes remaining below the limit; None: there is no limit."""
        if self.max_bytes is None:
            return None
        return self.max_bytes - self.num_bytes - self.bytes_elsewhere()

    @property
    def num_captured(self) -> int:
        """Captures that are kept, those without padding included."""
        return sum(len(each.captured) + len(each.unpadded.sizes) for each in self.programs.values())

    def capture(
        self, wanted: Iterable[tuple[Hashable, int]], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Captures budgets, `wanted` as (program's key, budget), largest first, and drops those that exceed
        the limit. Pauses between them, and calls `progress` with (budgets done, budgets).
        """
        ordered = sorted(wanted, key=lambda each: -each[1])
        while ordered:
            for done, (key, budget) in enumerate(ordered, 1):
                program = self.programs[key]
                program.capture(budget)
                if self.spare is not None and budget in program.ladder.out_of_memory:
                    spare, self.spare = self.spare, None
                    spare()
                    program.forget_drop(budget)
                    program.capture(budget)
                self._check_alone(program, budget)
                if progress is not None:
                    progress(done, len(ordered))
                pause()
            ordered, progress = self._drop_least_useful() if self._over_limit() else [], None

    def _check_alone(self, program: CapturedProgram, budget: int) -> None:
        """Drops the only capture if it exceeds the limit, and retires a pool without any."""
        captures = len(self.held())
        if captures == 1 and budget in program.captured and self._over_limit():
            program.drop(budget, f"{self._excess()}, by this one alone")
            captures = 0
        if captures == 0:  # what was tried and released left its memory in the pool
            program.shared.clear()
            self.pool.retire()

    def record(self, statistics: Statistics) -> None:
        """Makes statistics show these captures, those without padding of a program together."""
        shown: dict[CaptureKey, BudgetStats] = {}
        for program in self.programs.values():
            for budget, made in list(program.captured.items()):  # another thread may capture
                stats = BudgetStats(mode=made.mode, graph_bytes=program.ladder.num_bytes(budget))
                if (costs := program.ladder.costs.get(budget)) is not None:
                    stats.timed_replays, stats.milliseconds = 1, costs.best
                shown[program.key(budget)] = stats
            if program.unpadded.sizes:
                num_bytes = program.unpadded.num_bytes
                shown[program.key(0)] = BudgetStats(mode="exact", graph_bytes=num_bytes)
        statistics.record_captures(shown, sum(each.input_bytes for each in self.programs.values()))

    def clear(self) -> None:
        """Releases every capture and its memory."""
        for program in self.programs.values():
            program.clear()
        self.pool.retire()

    def held(self) -> list[tuple[Hashable, int]]:
        """Returns the (program's key, budget) pairs that are captured."""
        return [(key, budget) for key, program in self.programs.items() for budget in program.captured]

    def _over_limit(self) -> bool:
        remaining = self.remaining_bytes
        return remaining is not None and not (self.scope.agree or bool)(remaining >= 0)

    def _excess(self) -> str:
        return f"captures take {self.num_bytes} bytes, max_graph_bytes allows {self.max_bytes}"

    def _drop_least_useful(self) -> list[tuple[Hashable, int]]:
        """Drops the budgets that gain least for their bytes; releases and returns the rest."""
        # Bytes are not the same on all ranks: there one budget is dropped at a time.
        remaining = self.remaining_bytes
        assert remaining is not None
        excess = -remaining if self.scope.agree is None else 1
        reason = self._excess()
        # Whether the last one fits by itself, capturing it again tells.
        while excess > 0 and len(self.held()) > 1:
            program, budget = self._least_useful()
            excess -= max(1, program.num_bytes(budget))
            program.drop(budget, f"{reason}; it gains least for its memory")
        kept = self.held()
        for program in self.programs.values():
            program.release()
        self.pool.retire()
        return sorted(kept, key=lambda each: -each[1])

    def _least_useful(self) -> tuple[CapturedProgram, int]:
        found = []
        for key, program in self.programs.items():
            if budgets := sorted(program.captured):
                sizes = budgets if self.scope.agree else [program.num_bytes(budget) for budget in budgets]
                budget, gain = least_useful(program.costs, budgets, sizes, key in self.skippable)
                found.append((gain, program, budget))
        assert found, "nothing is captured, so no limit is exceeded"
        _, program, budget = min(found, key=lambda each: each[0])
        return program, budget


def least_useful(
    costs: PathCosts, budgets: Sequence[int], num_bytes: Sequence[int], skippable: bool
) -> tuple[int, float]:
    """Returns the budget that gains least for its bytes, and that gain: how much more all sizes up to the
    largest budget, each as likely as another, would cost without it. `skippable` as for `PathCosts.table`.
    """
    every = tuple(budgets)
    tokens = np.arange(1, every[-1] + 1)
    if not costs.measured:
        launches = EXACT_LAUNCH_TOKENS
        exact = ((1, 1.0 + launches), (every[-1] + 1, every[-1] + 1.0 + launches))
        costs = replace(costs, exact=exact)

    def total(kept: tuple[int, ...]) -> float:
        return float(costs.table(kept, every[-1], skippable).costs(tokens).mean())

    everything = total(every)
    gains = {
        budget: (total(tuple(b for b in every if b != budget)) - everything) / max(size, 1)
        for budget, size in zip(every, num_bytes, strict=True)
    }
    least = min(gains, key=gains.__getitem__)
    return least, gains[least]

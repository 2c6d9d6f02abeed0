"""What a forward costs without captures: run eagerly, and its attention, measured on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fxsplit_encoder.attention import KnownSegments, measuring
from fxsplit_encoder.capture import BudgetLadder, KnownBudget, measure_ms
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.costs import PathCosts, Points

if TYPE_CHECKING:
    from fxsplit_encoder.compile import BoundProgram

# Equal segments that a full budget is cut into to find what attention costs.
_MEASURED_SEGMENTS = 8


class TimedForward(Protocol):
    """A forward that can be run at any size."""

    device: torch.device
    program: BoundProgram | None
    """What it was compiled to."""

    def capture_values(self, tokens: int) -> dict[str, Tensor]:
        """Fresh inputs of so many output tokens; InputError if there are none."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The forward, not compiled."""


@dataclass(frozen=True)
class MeasuredForward:
    """What was measured of a forward without captures."""

    eager: Points = ()
    """(output tokens, milliseconds) of the tower's own forward."""

    attention: float = 0.0
    """Milliseconds of a pair of rows that attend to one another."""

    rows_per_token: float = 1.0
    """Rows of the attended sequence for an output token."""

    out_of_memory: int | None = None
    """The output tokens at which memory ran out, and no more were timed."""

    def with_captures(
        self, ladder: BudgetLadder, max_segments: Mapping[int, int], *, compiled: bool
    ) -> PathCosts:
        """The costs of the forward with its captures, or an order of preference where nothing was measured.

        Args:
            ladder: its captures.
            max_segments: the attention segments that a budget's capture holds.
            compiled: whether the forward was compiled, so that it can run at its exact shape.
        """
        budgets = sorted(ladder.captured)
        measured = ladder.costs
        if not measured:
            return PathCosts.unmeasured(budgets, max_segments)
        # A batch of short segments has less attention to hide the host behind.
        exact = tuple(
            (b, max(costs.host, self._beside_attention(b, costs.exact_price)))
            for b, costs in sorted(measured.items())
            if math.isfinite(costs.exact)  # else memory ran out
        )
        return PathCosts(
            replay={b: self._beside_attention(b, measured[b].best) for b in budgets},
            one_segment={
                b: self._beside_attention(b, cost)
                for b in budgets
                if (cost := measured[b].single_segment) is not None
            },
            exact=exact if compiled else (),
            eager=tuple((b, self._beside_attention(b, milliseconds)) for b, milliseconds in self.eager),
            attention=self.attention,
            max_segments=max_segments,
        )

    def attention_ms(self, budget: int) -> float:
        """Milliseconds of attention over one segment as long as a budget."""
        return self.attention * (budget * self.rows_per_token) ** 2

    def _beside_attention(self, budget: int, milliseconds: float) -> float:
        return max(0.0, milliseconds - self.attention_ms(budget))


@dataclass(frozen=True)
class KnownCosts:
    """What was measured of a forward and its captures, in another process on a device of the same kind."""

    forward: MeasuredForward
    budgets: Mapping[int, KnownBudget]
    capture_ms: float
    """What capturing and measuring a budget took."""


@torch.no_grad()
@measuring()
def measure_forward(forward: TimedForward, budgets: Sequence[int]) -> MeasuredForward:
    """Times the tower's own forward at the smallest, the middle and the largest budget, and attention."""
    eager: list[tuple[int, float]] = []
    attention, rows_per_token, out_of_memory = 0.0, 1.0, None
    for budget in sorted({budgets[0], budgets[len(budgets) // 2], budgets[-1]}):
        try:
            values = forward.capture_values(budget)
            eager.append((budget, measure_ms(lambda v=values: forward(v), forward.device)))  # type: ignore[misc]
            rows = forward.program.tokens(values) if forward.program is not None else None
            if rows is not None:
                rows_per_token = rows / budget
            attention = _attention_cost(forward, values, attention)
        except InputError:  # the tower has no inputs of this size
            continue
        except torch.OutOfMemoryError:
            out_of_memory = budget
            break
    return MeasuredForward(tuple(eager), attention, rows_per_token, out_of_memory)


def _attention_cost(forward: TimedForward, values: Mapping[str, Tensor], before: float) -> float:
    """Milliseconds of an attended pair, from a batch as one segment and as several of equal length; what was
    found before where the batch is too small to tell.
    """
    program = forward.program
    frames = program.region.frame_lengths if program is not None else None
    rows = program.tokens(values) if program is not None else None
    if program is None or frames is None or rows is None or rows < _MEASURED_SEGMENTS:
        return before

    def milliseconds(segments: int) -> float:
        cu_seqlens = (torch.arange(segments + 1) * rows // segments).to(torch.int32)
        on_device = cu_seqlens.to(forward.device)
        inputs = {**values, frames: on_device}

        def run() -> Tensor:
            return program(inputs, [KnownSegments(on_device, cu_seqlens.tolist())])

        return measure_ms(run, forward.device)

    pairs = rows**2 * (1 - 1 / _MEASURED_SEGMENTS)
    return max(0.0, (milliseconds(1) - milliseconds(_MEASURED_SEGMENTS)) / pairs)

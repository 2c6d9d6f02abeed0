"""Costs of a forward without captures: run eagerly, and its attention, measured on a device."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fxsplit_encoder.capture.forward import measure_run
from fxsplit_encoder.capture.inputs import is_cumulative
from fxsplit_encoder.capture.ladder import BudgetLadder, MeasuredCosts
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.kernels.attention import KnownSegments
from fxsplit_encoder.kernels.choice import measuring
from fxsplit_encoder.pauses import pause
from fxsplit_encoder.planning.costs import PathCosts, Points

if TYPE_CHECKING:
    from fxsplit_encoder.compile.program import BoundProgram

# Equal segments that a full budget is cut into to find what attention costs.
MEASURED_SEGMENTS = 8

# Attention in a tower's own code is timed at a quarter of the largest budget, or at more of it where the
# device keeps up with the host: there a run takes as long as the host needs, whatever attention takes.
_MEASURED_PARTS = (4, 2, 1)

# Sizes of a tower's own forward, from the largest down, at which an H200 needs longer than its host. A guess
# for others: a kernel that is not compared before is compared when it is timed.
_LIKELY_TIMED = 3

# The share of any run that attention takes at most. What a pair of rows costs is the difference of two runs,
# which other work on the device may make larger than a whole run that was timed at another moment; a batch
# never costs nothing. A choice: a segment of 65536 rows in a tower 1152 wide comes near it.
_MOST_ATTENTION = 0.95

# Inputs of which one segment has more of the pairs than this tell nothing of attention.
_ONE_SEGMENT = 0.9

logger = logging.getLogger(__name__)


class TimedForward(Protocol):
    """A forward that can be run at any size."""

    device: torch.device
    program: BoundProgram | None
    """What it was compiled to."""

    def capture_values(self, tokens: int) -> dict[str, Tensor]:
        """Fresh inputs of so many output tokens; InputError if there are none."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Runs the forward, not compiled."""


@dataclass(frozen=True)
class MeasuredForward:
    """Measurements of a forward without captures."""

    eager: Points = ()
    """(output tokens, milliseconds) of the tower's own forward."""
    attention: float = 0.0
    """Milliseconds of a pair of rows that attend to one another."""
    rows_per_token: float = 1.0
    """Rows of the attended sequence for an output token."""
    share: float = 1.0
    """Of the pairs of one segment as long as a budget, those that attend to one another in the inputs with
    which it is captured and timed: an eighth where a tower lays these out as eight equal images."""
    runs_share: float = 1.0
    """The same of the runs at the exact shape, which of a program are on one segment."""
    out_of_memory: int | None = None
    """The least output tokens at which memory ran out; None: nowhere."""
    eager_host: float = 0.0
    """Milliseconds that the host needs for the tower's own forward, whatever its size."""

    def with_captures(
        self, ladder: BudgetLadder, max_segments: Mapping[int, int], *, compiled: bool
    ) -> PathCosts:
        """Returns the costs with captures, or an order of preference where nothing was measured."""
        budgets = sorted(ladder.captured)
        max_segments = {b: max_segments[b] for b in budgets if b in max_segments}
        measured = ladder.costs
        if not measured:
            return PathCosts.unmeasured(budgets, max_segments)
        return self._limited(measured)._costs(budgets, measured, max_segments, compiled=compiled)

    def _limited(self, measured: Mapping[int, MeasuredCosts]) -> MeasuredForward:
        timed = [(b, milliseconds, self.share) for b, milliseconds in self.eager]
        for b, costs in measured.items():
            timed.append((b, costs.exact, self.runs_share))
            timed += [(b, milliseconds, self.share) for milliseconds in costs.modes.values()]
            timed += [(b, costs.single_segment, 1.0)] if costs.single_segment is not None else []
        pairs = ((share * (b * self.rows_per_token) ** 2, milliseconds) for b, milliseconds, share in timed)
        most = min(_MOST_ATTENTION * milliseconds / n for n, milliseconds in pairs if n)
        return replace(self, attention=min(self.attention, most))

    def _costs(
        self,
        budgets: Sequence[int],
        measured: Mapping[int, MeasuredCosts],
        max_segments: Mapping[int, int],
        *,
        compiled: bool,
    ) -> PathCosts:
        # A batch of short segments has less attention to hide the host behind.
        runs = tuple(
            (b, max(costs.host, self._beside_attention(b, price, self.runs_share)))
            for b, costs in sorted(measured.items())
            # Whoever serves a tower as it is compares with what its own forward takes, busy host or not.
            if math.isfinite(price := costs.exact_price if compiled else costs.exact)  # else memory ran out
        )
        eager = tuple(
            (b, max(self.eager_host, self._beside_attention(b, cost, self.share))) for b, cost in self.eager
        )
        exact = runs if compiled else ()
        if runs and not compiled:  # they were of the tower's own forward
            eager = runs
        return PathCosts(
            replay={b: self._beside_attention(b, measured[b].best, self.share) for b in budgets},
            one_segment={
                b: self._beside_attention(b, cost, 1.0)
                for b in budgets
                if (cost := measured[b].single_segment) is not None
            },
            exact=exact,
            eager=eager,
            attention=self.attention,
            max_segments=max_segments,
        )

    def attention_ms(self, budget: int, share: float | None = None) -> float:
        """Milliseconds of attention at a budget's size; `share` by default as in runs at the exact shape."""
        share = self.runs_share if share is None else share
        return self.attention * share * (budget * self.rows_per_token) ** 2

    def _beside_attention(self, budget: int, milliseconds: float, share: float) -> float:
        return max(0.0, milliseconds - self.attention_ms(budget, share))


@dataclass(frozen=True)
class KnownCosts:
    """Measurements of a forward and its captures, by another process on a device of the same kind."""

    forward: MeasuredForward
    budgets: Mapping[int, MeasuredCosts]
    capture_ms: float
    """What capturing and measuring a budget took."""


def measure_forward(forward: TimedForward, budgets: Sequence[int]) -> MeasuredForward:
    """Times the tower's own forward from the largest budget down, each at most half of the one before, until
    the host bounds it, and attention at the largest that memory holds; of one not compiled attention
    alone.
    """
    measure = _measure_compiled if forward.program is not None else _measure_uncompiled
    with torch.no_grad(), measuring():
        return measure(forward, budgets)


def run_timed(forward: TimedForward, budgets: Sequence[int]) -> None:
    """Runs, once each, what `measure_forward` times and no capture runs, so that its kernels become known."""
    likely = itertools.islice(_halved(budgets), _LIKELY_TIMED) if forward.program is not None else ()
    for budget in likely:
        with contextlib.suppress(InputError, torch.OutOfMemoryError):
            values = forward.capture_values(budget)
            with torch.no_grad():
                forward(values)
            pause()
    with contextlib.suppress(InputError, torch.OutOfMemoryError):  # which measuring says
        run = _attention_run(forward, forward.capture_values(budgets[-1]), MEASURED_SEGMENTS)
        if run is not None:
            pause()
            with torch.no_grad():
                run()


def _measure_compiled(forward: TimedForward, budgets: Sequence[int]) -> MeasuredForward:
    assert forward.program is not None
    eager: list[tuple[int, float]] = []
    attention, rows_per_token, out_of_memory = 0.0, 1.0, None
    share = runs_share = 1.0
    host = 0.0
    for budget in _halved(budgets):
        try:
            values = forward.capture_values(budget)
            run = measure_run(functools.partial(forward, values), forward.device)
        except InputError:  # the tower has no inputs of this size
            continue
        except torch.OutOfMemoryError:
            out_of_memory = budget
            continue
        rows = forward.program.tokens(values)
        if rows is not None and not eager:
            rows_per_token = rows / budget
            share, runs_share = _shares(forward.program, values, rows)
        eager.insert(0, (budget, run.wall))
        host = run.host  # of the smallest: behind a long queue the host waits, too
        if run.is_bound_by_host:
            break
        pause()
    for budget, _ in reversed(eager):
        try:
            attention = attention_cost(forward, forward.capture_values(budget))
            break
        except torch.OutOfMemoryError:
            out_of_memory = budget
    return MeasuredForward(
        tuple(eager), attention, rows_per_token, share, runs_share, out_of_memory, eager_host=host
    )


def _halved(budgets: Sequence[int]) -> Iterator[int]:
    most: float = budgets[-1]
    for budget in reversed(budgets):
        if budget <= most:
            yield budget
            most = budget / 2


def _shares(program: BoundProgram, values: Mapping[str, Tensor], rows: int) -> tuple[float, float]:
    frames = program.region.frame_lengths
    if frames is None or frames not in values:
        return 1.0, 1.0
    share = _share_of(values[frames].tolist(), rows)
    return share, 1.0 if program.region.program.padding.segments_may_grow else share


def _share_of(cu_seqlens: Sequence[int], rows: int) -> float:
    return sum((end - start) ** 2 for start, end in itertools.pairwise(cu_seqlens)) / rows**2


def _measure_uncompiled(forward: TimedForward, budgets: Sequence[int]) -> MeasuredForward:
    """Measures attention by several equal segments and one: the cost of a segment grows with its square."""
    limits = [budgets[-1] // part for part in _MEASURED_PARTS]
    sizes = [max((each for each in budgets if each <= most), default=budgets[0]) for most in limits]
    try:
        for budget in dict.fromkeys(sizes):
            values = forward.capture_values(budget)
            lengths = {name: value.tolist() for name, value in values.items() if is_cumulative(value)}
            if not lengths:
                return MeasuredForward()
            # Of cumulative lengths over the same rows those of images are fewer than those of their windows.
            name = min(lengths, key=lambda each: (-lengths[each][-1], len(lengths[each])))
            several = measure_run(functools.partial(forward, values), forward.device)
            pause()
            if not several.is_bound_by_host:
                break
        rows = lengths[name][-1]
        share = _share_of(lengths[name], rows)
        if share > _ONE_SEGMENT:
            return MeasuredForward(rows_per_token=rows / budget)
        one = torch.full_like(values[name], rows)
        one[0] = 0
        single = measure_run(lambda: forward({**values, name: one}), forward.device)
    except (InputError, RuntimeError) as error:  # of its own code, over lengths that it did not expect
        logger.info("what attention costs is not known: %s", error)
        return MeasuredForward()
    attention = max(0.0, single.wall - several.wall) / (rows**2 * (1 - share))
    return MeasuredForward((), attention, rows / budget, share, share)


def attention_cost(forward: TimedForward, values: Mapping[str, Tensor]) -> float:
    """Milliseconds of an attended pair; 0 where the host bounds the runs, whose difference is noise."""
    one, several = (_attention_run(forward, values, segments) for segments in (1, MEASURED_SEGMENTS))
    if forward.program is None or one is None or several is None:
        return 0.0
    rows = forward.program.tokens(values)
    assert rows is not None
    as_one = measure_run(one, forward.device)
    pause()
    apart = measure_run(several, forward.device)
    if as_one.is_bound_by_host:
        return 0.0
    pairs = rows**2 * (1 - 1 / MEASURED_SEGMENTS)
    return max(0.0, (as_one.wall - apart.wall) / pairs)


def _attention_run(
    forward: TimedForward, values: Mapping[str, Tensor], segments: int
) -> Callable[[], Tensor] | None:
    """Returns the program over a batch as so many equal segments; None: too small to measure attention."""
    program = forward.program
    frames = program.region.frame_lengths if program is not None else None
    rows = program.tokens(values) if program is not None else None
    if program is None or frames is None or rows is None or rows < MEASURED_SEGMENTS:
        return None
    cu_seqlens = (torch.arange(segments + 1, device="cpu") * rows // segments).to(torch.int32)
    on_device = cu_seqlens.to(forward.device)
    inputs = {**values, frames: on_device}
    known = [KnownSegments(on_device, cu_seqlens.tolist())]
    return lambda: program(inputs, known)

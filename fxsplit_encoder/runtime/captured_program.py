"""`CapturedProgram`: one forward with its captures, which both the manager and torch.compile run."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch

from fxsplit_encoder._torch.modes import in_inference_mode as inference_mode
from fxsplit_encoder.caching import Recent
from fxsplit_encoder.capture.buffers import SharedBuffers, StaticValue
from fxsplit_encoder.capture.forward import CapturedForward, CaptureRequest, ProgramBody
from fxsplit_encoder.capture.ladder import BudgetLadder
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import CaptureError, ReplayError
from fxsplit_encoder.kernels.attention import KernelChooser
from fxsplit_encoder.kernels.attention.chooser import choosing
from fxsplit_encoder.kernels.choice import Chooser, KernelMeasurements, failing
from fxsplit_encoder.kernels.products.measured import CHOOSER as PRODUCT_CHOOSER
from fxsplit_encoder.pauses import pause
from fxsplit_encoder.planning.costs import PathCosts
from fxsplit_encoder.planning.limits import CaptureKey
from fxsplit_encoder.planning.plan import BY_THE_TOWER, CaptureSize, MissReason, PathPlan
from fxsplit_encoder.runtime.measure import KnownCosts, MeasuredForward
from fxsplit_encoder.runtime.requests import CaptureScope
from fxsplit_encoder.runtime.unpadded import UnpaddedCaptures

if TYPE_CHECKING:
    from fxsplit_encoder.compile.program import NamedRegion

logger = logging.getLogger(__name__)

_NOTHING_CAPTURED = frozenset({MissReason.NOT_CAPTURED, MissReason.NEW_SHAPE})
_MOST_TOLD = 256

Served: TypeAlias = tuple[Sequence[Any], PathPlan, int | None]
"""The outputs of a batch, which the next replay overwrites; the plan as it was served; and the budget of the
replay: 0 for one without padding, None for no replay."""


class CapturedProgram(ABC):
    """One forward, a program at any size or a tower's own code, with its captures: a ladder of increasing
    `budgets`, in output tokens, captured in the configuration's `mode`; and captures of the token counts
    that recur.
    """

    declares_padding = False
    """Whether padding is taken to leave real rows alone without a proof."""

    def __init__(self, label: str, budgets: Sequence[int], mode: str, scope: CaptureScope) -> None:
        self.label = label
        self.budgets = tuple(budgets)
        self.mode = mode
        self.scope = scope
        self._checks = scope.weight_checks
        self.shared = SharedBuffers()
        self.segment_capacity: dict[int, int] = {}
        """The attention segments that a captured budget holds; without an entry for a forward without any."""
        self.token_capacity: dict[int, int] = {}
        """The output tokens that a captured budget holds."""
        self.notes: list[str] = []
        """What was dropped or runs in another way than asked, and why."""
        self.measured = MeasuredForward()
        self.expected: KnownCosts | None = None
        """What need not be measured, see `expect`."""
        self._told: Recent[str, None] = Recent(_MOST_TOLD)
        self.ladder = BudgetLadder(
            self._request_of_budget,
            mode,
            scope.pool,
            measured=scope.measured,
            attention_ms=lambda tokens: self.measured.attention_ms(tokens),
            agree=scope.agree or bool,
            compares_kernels=scope.compares_kernels,
        )
        self.unpadded = UnpaddedCaptures(
            self._request_of_count, scope, attention_ms=lambda tokens: self.measured.attention_ms(tokens)
        )

    # --- what may be captured

    @property
    @abstractmethod
    def region(self) -> NamedRegion | None:
        """The region of the program; None where the forward is captured as it is."""

    @property
    def padding_proved(self) -> bool:
        """Whether the program is proved to keep its rows apart."""
        region = self.region
        return region is not None and region.program.padding.proved

    @property
    def padding_refused(self) -> bool:
        """Whether nothing is padded: the rows are not proved to stay apart, nor declared to."""
        region = self.region
        return region is not None and not (self.declares_padding or region.program.padding.proved)

    @property
    def recurring_counts(self) -> str | None:
        """When token counts are captured unpadded: "hits", "cost" (`UnpaddedCaptures`); None: never."""
        if self.mode == "none":
            return None
        if self.mode == "exact" or self.padding_refused:
            return "hits"
        by_cost = self.mode == "auto" and self.scope.measured and self.scope.config.capture_recurring
        return "cost" if by_cost else None

    @abstractmethod
    def request(self, tokens: int, shared: SharedBuffers) -> CaptureRequest:
        """Makes a capture request of so many output tokens over `shared` inputs, or raises CaptureError."""

    def is_always_full(self, tokens: int) -> bool:
        """Whether only batches that fill a budget of so many output tokens take it."""
        return False

    def padding_change(self, captured: CapturedForward, tokens: int) -> str | None:
        """Returns how a new capture changes the results of a batch that may take it; None: it does not, or
        there is no batch to compare with.
        """
        return None

    def _request_of_budget(self, budget: int) -> CaptureRequest:
        region = self.region
        if region is not None and self.padding_refused and not self.is_always_full(budget):
            raise CaptureError(f"its rows are not known to be independent ({region.program.padding})")
        request = self.request(budget, self.shared)
        if request.segment_inputs and region is not None and region.program.padding.segments_may_grow:
            buffers = request.inputs.buffers
            entries = (buffers[name].tensor.shape[0] for name in request.segment_inputs)
            self.segment_capacity[budget] = min(entries) - 1
        return request

    def _request_of_count(self, tokens: int, shared: SharedBuffers) -> CaptureRequest:
        request = self.request(tokens, shared)
        if self.padding_refused and isinstance(body := request.body, ProgramBody):
            # Of rows that may depend on one another, a single one is not the first of two.
            if not body.program.accepts(body.bindings.symbols):
                raise CaptureError(f"the trace does not hold for {tokens} tokens, which are a single row")
        return request

    # --- captures

    @property
    def serves(self) -> bool:
        """Whether batches may be replayed, or were found to need no graph."""
        return bool(self.captured or self.ladder.no_graph_needed) or self.recurring_counts == "hits"

    @property
    def captured(self) -> dict[int, CapturedForward]:
        """The captures by budget."""
        return self.ladder.captured

    def capture(self, budget: int) -> None:
        """Captures one budget once, or notes why it is dropped. Pauses as `BudgetLadder.capture`."""
        captured = None if budget in self.captured else self.ladder.capture(budget)
        if captured is not None and not (self.padding_proved or self.declares_padding):
            for each in (captured, captured.for_one_segment or captured):
                each.must_be_full = self.is_always_full(budget)
        # Where nothing says that padding leaves rows alone, always; where the tower says so, with `debug`.
        compares = not self.padding_proved and (self.scope.config.debug or not self.declares_padding)
        if captured is not None and compares:
            pause()
            change = self.padding_change(captured, budget)
            if not (self.scope.agree or bool)(change is None):
                full = captured.must_be_full
                what = "it gives other results than the forward" if full else "padding changes its results"
                self.ladder.drop(budget, f"{what}: {change or 'on another rank'}")
        if captured is not None and budget in self.captured:
            self.token_capacity[budget] = self.tokens_held(budget)
        if budget in self.ladder.replaced:
            self.note(f"{self.label}: budget {budget} is {self.ladder.replaced[budget]}")
        if budget in self.ladder.dropped:
            self.note(f"{self.label}: budget {budget} is dropped: {self.ladder.dropped[budget]}")

    def tokens_held(self, budget: int) -> int:
        """Output tokens that the capture of a budget has room for."""
        return budget

    def drop(self, budget: int, reason: str) -> None:
        """Releases the captures of one budget."""
        self.ladder.drop(budget, reason)
        self.note(f"{self.label}: budget {budget} is dropped: {reason}")

    def forget_drop(self, budget: int) -> None:
        """Lets the next `capture` of a dropped budget try again, and removes the note of the drop."""
        said = f"{self.label}: budget {budget} is dropped: "
        self.notes = [note for note in self.notes if not note.startswith(said)]
        self.ladder.forget_drop(budget)

    def release(self) -> None:
        """Releases every capture, to be made again; dropped budgets stay dropped."""
        self.ladder.release()
        self.shared.clear()
        self.unpadded.clear()

    def clear(self) -> None:
        """Releases every capture, and forgets measurements and dropped budgets."""
        self.release()
        self.ladder.clear()

    def note(self, note: str) -> None:
        """Records a note about a dropped budget or a fallback, and warns once."""
        if note not in self.notes:
            self.notes.append(note)
            logger.warning("%s", note)

    # --- memory

    @property
    def input_bytes(self) -> int:
        """Bytes of the static inputs of all captured budgets."""
        return sum(
            {
                storage.data_ptr(): storage.nbytes()
                for captured in list(self.captured.values())  # another thread may capture
                for tensor in captured.inputs.tensors.values()
                if (storage := tensor.untyped_storage()).data_ptr()
            }.values()
        )

    def num_bytes(self, budget: int) -> int:
        """Returns the bytes of this budget alone: graphs, and inputs that no other reads."""
        others = _read_bytes([captured for other, captured in self.captured.items() if other != budget])
        own = _read_bytes([self.captured[budget]])
        unshared = (max(0, num_bytes - others.get(address, 0)) for address, num_bytes in own.items())
        return self.ladder.num_bytes(budget) + sum(unshared)

    # --- costs

    @property
    def costs(self) -> PathCosts:
        """The measured costs, or an order of preference where nothing was measured."""
        compiled = self.region is not None
        costs = self.measured.with_captures(self.ladder, self.segment_capacity, compiled=compiled)
        not_needed = frozenset(self.ladder.no_graph_needed)
        return replace(costs, max_tokens=self.token_capacity, not_needed=not_needed)

    def expect(self, known: KnownCosts) -> None:
        """Uses measurements of another process on a device of the same kind; `clear` keeps them."""
        self.expected = known
        self.ladder.expect(known.budgets, known.capture_ms)

    def known(self) -> KnownCosts:
        """Returns what was measured here or passed to `expect`."""
        return KnownCosts(self.measured, self.ladder.known(), self.ladder.capture_ms)

    # --- replays

    def captures_for(
        self, planned: PathPlan, *, capture_now: bool = False
    ) -> list[tuple[int, BudgetLadder, int]]:
        """Returns captures that may serve a batch, the best first: (budget, 0 without padding; ladder; size).
        With `capture_now` the batch's own count is captured at once if ever.
        """
        found: list[tuple[int, BudgetLadder, int]] = []
        by = self.recurring_counts
        if by is not None:
            refused = self.padding_refused
            if not (refused and planned.tokens in self.ladder.captured):
                # Where nothing is padded, a batch that fills a budget is as welcome as one that recurs.
                fills = refused and planned.tokens in self.budgets
                ladder = self.unpadded.find(planned, by_cost=by == "cost", now=capture_now or fills)
                if ladder is not None:
                    found.append((0, ladder, planned.size))
        if planned.budget is not None and planned.budget in self.ladder.captured:
            found.append((planned.budget, self.ladder, planned.budget))
        return found

    def best_capture(
        self, ladder: BudgetLadder, size: int, values: Mapping[str, StaticValue | None]
    ) -> CapturedForward:
        """Returns the capture of a size for a batch; ReplayError if a value is missing (capture rule 4)."""
        region = self.region
        lengths = values.get(region.frame_lengths) if region and region.frame_lengths is not None else None
        captured = ladder.captured[size]
        if captured.for_one_segment is not None and isinstance(lengths, torch.Tensor):
            captured = captured.for_one_segment if lengths.shape[0] == 2 else captured
        inputs = captured.inputs
        if not inputs.buffers.keys() <= values.keys():
            inputs.check_complete(values)
        return captured

    def run(
        self,
        planned: PathPlan,
        batch: Any,
        *,
        may_replay: bool = True,
        capture_now: bool = False,
        in_inference_mode: bool = False,
    ) -> Served:
        """Runs a planned batch: loads and replays the best capture; without one that takes it, at the exact
        shape, or else through the tower's own code, with `in_inference_mode` in that mode. The caller
        holds the pool. WeightsMovedError where a capture reads parameters that are elsewhere now.
        """
        captures = self.captures_for(planned, capture_now=capture_now) if may_replay else ()
        values, rows, exceeded = None, None, False
        if captures or self.runs_compiled(planned):
            values = self._values(planned, batch, in_inference_mode=in_inference_mode)
        if values is None:
            exceeded, captures = bool(captures), ()
        elif captures:
            rows = self.rows(batch, values)
        for budget, ladder, size in captures:
            assert values is not None
            if not budget and not self.fits(size, rows):
                continue
            captured = self.best_capture(ladder, size, values)
            try:
                captured.load(values, rows)
            except ReplayError as error:
                # Raised before anything was copied: the batch is whole.
                self._tell(size, error)
                exceeded = True
                continue
            if not budget and not self._keeps(captured, size, values, rows, batch):
                continue
            checks = self._checks
            are_checked = checks is None or not (checks.are_always_due or checks.is_due(self))
            outputs = None
            try:
                outputs = captured.replay(debug=self.scope.config.debug, parameters_are_checked=are_checked)
            finally:  # whatever was raised, by a break too: what moved has perhaps not been looked at
                if outputs is None and checks is not None:
                    checks.all_are_due()
            as_planned = budget and size == planned.budget
            return (
                outputs,
                planned if as_planned else PathPlan(planned.tokens, budget or planned.tokens),
                budget,
            )
        planned = planned._replace(
            reason=MissReason.EXTENT_EXCEEDED if exceeded else self.miss_reason(planned)
        )
        return self._run_without_replay(planned, batch, values, in_inference_mode=in_inference_mode)

    def _values(
        self, planned: PathPlan, batch: Any, *, in_inference_mode: bool
    ) -> Mapping[str, StaticValue | None] | None:
        try:
            if in_inference_mode and self.region is None:  # no program gets what it makes
                with inference_mode():
                    return self.values(batch)
            return self.values(batch)
        except ReplayError as error:
            self._tell(planned.tokens, error)
            return None

    def _tell(self, size: CaptureSize, error: ReplayError) -> None:
        """Logs why a batch is not replayed, as a warning the first time."""
        message = f"{self.label}, {size} tokens: {error}"
        logger.log(logging.DEBUG if message in self._told else logging.WARNING, "%s", message)
        self._told[message] = None

    def _run_without_replay(
        self,
        planned: PathPlan,
        batch: Any,
        values: Mapping[str, StaticValue | None] | None,
        *,
        in_inference_mode: bool,
    ) -> Served:
        if planned.eager or values is None:
            with torch.inference_mode() if in_inference_mode else contextlib.nullcontext():
                return self.run_eager(batch), planned._replace(budget=None, eager=True), None
        outputs, compiled = self.run_unpadded(batch, values)
        return outputs, planned._replace(budget=None, eager=not compiled), None

    @abstractmethod
    def key(self, budget: int) -> CaptureKey:
        """Returns the key of a budget's capture in statistics; 0: of captures without padding."""

    @abstractmethod
    def values(self, batch: Any) -> Mapping[str, StaticValue | None]:
        """Returns the inputs of a batch; ReplayError where only the tower's own code takes it."""

    def rows(self, batch: Any, values: Mapping[str, StaticValue | None]) -> int | None:
        """Returns the rows of a batch on the token dimension; None: not known."""
        return None

    def fits(self, size: int, rows: int | None) -> bool:
        """Returns whether a capture of `size` output tokens has as many rows as the batch."""
        return True

    def runs_compiled(self, planned: PathPlan) -> bool:
        """Whether a planned batch that is not replayed goes through the compiled program."""
        return True

    @abstractmethod
    def run_unpadded(
        self, batch: Any, values: Mapping[str, StaticValue | None]
    ) -> tuple[Sequence[Any], bool]:
        """Runs a batch at its exact shape; returns its outputs and whether the compiled program ran."""

    @abstractmethod
    def run_eager(self, batch: Any) -> Sequence[Any]:
        """Runs a batch through the tower's own code."""

    def copy_of(self, batch: Any) -> Any:
        """Returns a copy of a batch where a run uses it up."""
        return batch

    def _keeps(
        self,
        captured: CapturedForward,
        size: int,
        values: Mapping[str, StaticValue | None],
        rows: int | None,
        batch: Any,
    ) -> bool:
        def replay() -> None:
            captured.load(values, rows)
            captured.replay()

        return self.unpadded.keeps(size, replay, lambda: self.run_unpadded(self.copy_of(batch), values))

    def as_served(self, planned: PathPlan) -> PathPlan:
        """Returns a plan as captures without padding serve it now."""
        if planned.skipped:
            return planned
        if planned.tokens in self.unpadded:
            return PathPlan(planned.tokens, planned.tokens)
        return planned if planned.budget is not None else planned._replace(reason=self.miss_reason(planned))

    def miss_reason(self, planned: PathPlan) -> MissReason:
        """Returns why a planned batch without a replay counts as a miss."""
        if planned.reason in BY_THE_TOWER:
            return planned.reason
        reason = None
        if self.recurring_counts == "hits":
            reason = self.unpadded.reason(planned)
        reason = reason or planned.reason or MissReason.NOT_CAPTURED
        if self.padding_refused and reason in _NOTHING_CAPTURED and self.mode != "exact":
            return MissReason.PADDING_UNPROVED
        return reason


def _read_bytes(captures: Sequence[CapturedForward]) -> dict[int, int]:
    read: dict[int, int] = {}
    for captured in captures:
        for buffer in captured.inputs.buffers.values():
            read[buffer.address] = max(read.get(buffer.address, 0), buffer.tensor.nbytes)
    return read


@dataclass
class Choosers:
    """The kernel choosers of one configuration, one for each operation: linear layers have no settings."""

    attention: KernelChooser = field(default_factory=KernelChooser)

    @classmethod
    def of(cls, config: EncoderConfig) -> Self:
        """Makes the choosers of a configuration; ConfigError for an unknown kernel or condition."""
        return cls(KernelChooser(config.attention, invariant=config.invariant))

    def failures(self, device: torch.device) -> list[str]:
        """Returns a line for each operation and reason with the kernels that raise on a device."""
        names: dict[tuple[str, str], list[str]] = {}
        for chooser in self.all:
            measurements = chooser.measurements
            for name, reason in failing(measurements.table(device)).items():
                names.setdefault((measurements.shape.operation, reason), []).append(name)
        return [f"{operation}: {', '.join(each)}: {reason}" for (operation, reason), each in names.items()]

    def choosing(self) -> choosing:
        """Returns a context in which these choose kernels."""
        return choosing(self.attention)

    @property
    def measurements(self) -> list[KernelMeasurements[Any, Any]]:
        """The measurements of every operation."""
        return [chooser.measurements for chooser in self.all]

    @cached_property
    def all(self) -> tuple[Chooser[Any, Any], ...]:
        """Every chooser."""
        return self.attention, PRODUCT_CHOOSER

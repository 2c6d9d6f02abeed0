"""Budget dispatch: a call of a compiled graph becomes a padded replay, or the program at its exact shape."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, ClassVar, TypeAlias

import torch

from fxsplit_encoder._torch.device import on_device
from fxsplit_encoder._torch.dynamo import original_module, owners_of, owners_of_trace
from fxsplit_encoder._torch.modes import without_autograd
from fxsplit_encoder._torch.tensors import copy_each
from fxsplit_encoder.backend.call_program import (
    PATH,
    CallParameters,
    CallProgram,
    PaddedProgram,
    ProgramBudgets,
    SizedProgram,
    run_exact,
    sizes_of,
)
from fxsplit_encoder.caching import Recent
from fxsplit_encoder.capture.buffers import storage_address
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.compile.blocks import LiveWeights
from fxsplit_encoder.compile.program import Argument, Bindings, NamedRegion, Program
from fxsplit_encoder.compile.sizes import Size
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import WeightsMovedError
from fxsplit_encoder.planning.costs import CostModel
from fxsplit_encoder.planning.limits import CaptureKey, Limits
from fxsplit_encoder.planning.plan import Item, MissReason, PathPlan
from fxsplit_encoder.planning.planner import build_plan
from fxsplit_encoder.protocol import EncoderItemSpec
from fxsplit_encoder.runtime.captured_program import Choosers
from fxsplit_encoder.runtime.memory_limit import CaptureSet
from fxsplit_encoder.runtime.requests import CaptureScope, WeightChecks
from fxsplit_encoder.runtime.statistics import ManagerStats, Statistics
from fxsplit_encoder.runtime.unpadded import rows_of

logger = logging.getLogger(__name__)

# Forwards of other sizes than the token count whose captures are kept, before all of them are given up.
_MOST_PROGRAMS = 32

# Modules of one class whose captures a graph keeps, before those of the least recent one are given up.
_MOST_MODULES = 64

# Plans depend on sizes alone, and the same sizes come again.
_KEPT_PLANS = 1024

_warming = threading.local()


def dispatchers() -> list[BudgetDispatcher]:
    """Returns the live dispatchers of this process."""
    return list(BudgetDispatcher.alive)


@contextlib.contextmanager
def capturing_all() -> Iterator[list[BudgetDispatcher]]:
    """Every dispatcher called inside captures its whole ladder; yields those that did."""
    _warming.called = []
    try:
        yield _warming.called
    finally:
        _warming.called = None


_ServedCall: TypeAlias = tuple[list[Any], PathPlan, CaptureKey | None]
"""Outputs of a call, the caller's own; its plan; and the key of the capture, None at the exact shape."""


class BudgetDispatcher:
    """Runs one program for inputs of any size.

    On a call: the cheapest of the captured budgets with capacity for it, the smallest of which is captured on
    first use; pad, replay, cut to the true sizes, clone. A graph without a token count is captured at all
    sizes of a call once they have come `exact_min_hits` times. Else the program runs at the exact shape;
    `misses` counts why.

    Args:
        weights: the program's last inputs, which a call is not given.
        owners: whose graph it is; None: that of the current trace.
    """

    alive: ClassVar[weakref.WeakSet[BudgetDispatcher]] = weakref.WeakSet()
    """Those of this process."""

    def __init__(
        self,
        program: Program,
        config: EncoderConfig,
        weights: LiveWeights,
        owners: Sequence[weakref.ref[Any]] | None = None,
    ) -> None:
        self.program = program
        self.config = config
        self.pool = GraphPool(program.device)
        self.kernels = Choosers.of(config)
        self.kernels.attention.check(program.device)
        self.statistics = Statistics(log_interval=0)
        self.owners = owners_of_trace() if owners is None else owners
        """Whose graph it is: what `torch.compile` made, and the module."""
        self.ends: Sequence[weakref.ref[torch.Tensor]] = ()
        """The first and the last parameter among the arguments; empty: there is none."""
        self.programs: dict[tuple[int, ...], CallProgram] = {}
        """By the sizes other than the token count: they are part of a capture's shape. Without a token count
        a single one for all sizes."""
        self._has_tokens = program.token_symbol is not None and not program.padding.other_rows
        self._refusal = self._why_never_captured()
        # There is a graph to break at its splitting ops already, and no untouched module any more.
        self._mode = "piecewise" if config.mode == "breakable" else config.mode
        self._weight_checks = WeightChecks(config.weight_check_seconds)
        self._captures = CaptureSet(CaptureScope(config, self.pool, weight_checks=self._weight_checks))
        self._captures.programs = self.programs
        slots = {entry.slot: f"input {entry.slot}" for entry in program.region_inputs}
        self._region = NamedRegion(program, slots)  # whose inputs have no names but those of their slots
        self._parameters = CallParameters(program, weights)
        self._segment_slots = [
            entry.slot
            for entry in program.region_inputs
            if entry.is_segments and program.padding.segments_may_grow
        ]
        """Cumulative lengths of which captures hold more than a call; others' numbers select the program."""
        self.known_budgets: ProgramBudgets | None = None
        self._plans: Recent[tuple[Any, ...], PathPlan] = Recent(_KEPT_PLANS)
        self._lock = threading.RLock()
        self.alive.add(self)

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Runs the graph on its inputs; the outputs are the caller's own (capture rule 7)."""
        on_its_device = on_device(self.pool.device)
        with self._lock, self.kernels.choosing(), on_its_device, without_autograd():
            warmed = getattr(_warming, "called", None)
            try:
                outputs, planned, key = self._served(args, capture_all=warmed is not None)
            except WeightsMovedError:
                if self.programs:
                    logger.warning("capturing again: parameters were replaced since the capture")
                self.clear()
                outputs, planned, key = self._served(args, capture_all=warmed is not None)
            if warmed is not None:
                warmed.append(self)  # and is counted nowhere: the caller discards its outputs
                return outputs
            self.statistics.record_items(1, planned.reason)
            if key is None:
                self.statistics.record_fallback("exact")
            else:
                self.statistics.record_replay(key, planned.tokens)
            return outputs

    def clear(self) -> None:
        """Releases every capture and its memory; the next calls capture again."""
        with self._lock:
            self._captures.clear()
            self.programs.clear()
            self._plans.clear()
            self._weight_checks.all_are_due()

    def let_go(self) -> None:
        """Keeps no parameter alive until the next call."""
        with self._lock:
            self._parameters.let_go()
            self.program.derived.let_go()

    def outdate_weights(self) -> None:
        """Makes the next call check its parameters and compute derived ones anew."""
        with self._lock:
            self._weight_checks.all_are_due()
            self.program.derived.outdate()

    @property
    def hits(self) -> int:
        """Calls that replays served."""
        return self.statistics.snapshot().hits

    @property
    def misses(self) -> Counter[MissReason]:
        """Calls that ran at their exact shape, by reason."""
        return Counter(self.statistics.snapshot().misses)

    def stats(self) -> ManagerStats:
        """Returns statistics of calls, each one item; sizes other than the token count are axis keys."""
        with self._lock:
            self._captures.record(self.statistics)
            return replace(self.statistics.snapshot(), derived_bytes=self.program.derived.num_bytes)

    @property
    def num_captured(self) -> int:
        """Captures that are kept."""
        return self._captures.num_captured

    # --- which capture

    def _why_never_captured(self) -> MissReason | None:
        if not self.config.enabled or self.config.mode == "none":
            return MissReason.DISABLED
        given = {symbol for symbol, _, _ in self.program.symbol_sources}
        unknown = [symbol for symbol in self.program.region_symbols if symbol not in given]
        refusal = self.program.padding.capture_refusal
        if unknown:
            refusal = refusal or f"it has sizes that depend on data ({', '.join(unknown)})"
        if not refusal:
            return None
        logger.warning("a graph is never captured, so that every call runs at its exact shape: %s", refusal)
        return MissReason.UNSUPPORTED_GRAPH

    def _budgets(self, bindings: Bindings) -> ProgramBudgets:
        if self.known_budgets is None:
            self.known_budgets = ProgramBudgets.of(self.program, self.config, bindings)
            padding = self.program.padding
            if self._mode != "exact" and not padding.allowed:
                logger.warning(
                    "a graph is never padded, so only calls that fill a budget or repeat a size are "
                    "replayed: real rows may depend on pad rows at %s%s",
                    padding,
                    f" ({padding.source})" if padding.source else "",
                )
        return self.known_budgets

    def _captured_program(self, bindings: Bindings) -> CallProgram:
        key = sizes_of(self.program, bindings) if self._has_tokens else ()
        if key not in self.programs:
            if len(self.programs) >= _MOST_PROGRAMS:
                logger.warning("captures of %d other sizes are given up for new ones", _MOST_PROGRAMS)
                self.clear()
            of, how = (self._region, self._parameters), (self._mode, self._captures.scope)
            self.programs[key] = (
                PaddedProgram(*of, self._budgets(bindings), bindings, *how)
                if self._has_tokens
                else SizedProgram(*of, *how)
            )
        return self.programs[key]

    def _plan(self, program: CallProgram, bindings: Bindings, rows: int) -> PathPlan:
        """Plans a call of so many rows, after the smallest budget for it has been captured."""
        entries = [bindings.slots[slot].shape[0] for slot in self._segment_slots]
        key = (id(program), rows, *entries)
        if key in self._plans:  # `get` would be a call in Python
            return self._plans[key]
        budgets = self._budgets(bindings)
        factors = map(budgets.segment_factor, self._segment_slots)
        tokens = budgets.tokens_of(rows)
        segments = max((-(-(n - 1) // each) for n, each in zip(entries, factors, strict=True)), default=1)
        too_small = self._capture_smallest(program, budgets, tokens, segments)
        costs = program.costs
        if costs.measured:
            program.unpadded.use_costs(costs, program.ladder.capture_ms)
        plan = build_plan(
            [Item(EncoderItemSpec(tokens, tokens), segments=segments)],
            Limits({PATH: program.budgets}, max_items_per_batch=1, max_frames_per_batch=0),
            costs=CostModel({(PATH, ()): costs}),
        )
        planned = plan.batches[0].paths[PATH]
        if planned.reason is MissReason.NOT_CAPTURED and too_small:
            planned = planned._replace(reason=MissReason.TOO_MANY_SEGMENTS)
        self._plans[key] = planned
        return planned

    def _capture_smallest(
        self, program: CallProgram, budgets: ProgramBudgets, tokens: int, segments: int
    ) -> bool:
        """Captures the smallest budget for a call; whether one had room for its tokens, not its segments."""
        too_small = False
        if program.mode == "exact" or program.padding_refused:
            return too_small
        for budget in program.budgets:
            if budget < tokens or budget in program.ladder.dropped:
                continue
            if any(segments > budgets.segments_held(slot, budget) for slot in self._segment_slots):
                too_small = True
                continue
            self._capture(program, [budget])
            if budget in program.captured or budget in program.ladder.no_graph_needed:
                break
        return too_small

    def _capture(self, program: CallProgram, budgets: Sequence[int]) -> None:
        done = {*program.captured, *program.ladder.dropped, *program.ladder.no_graph_needed}
        new = [budget for budget in budgets if budget not in done]
        if not new:
            return
        self._parameters.check_addresses()
        self._plans.clear()
        self._captures.capture([(program.sizes, budget) for budget in new])

    # --- replay

    def _served(self, args: Sequence[Any], *, capture_all: bool) -> _ServedCall:
        """Serves a call; WeightsMovedError where captures read parameters that are elsewhere now."""
        bindings = self.program.begin([*args, *self._parameters.begin(args)])
        if self._refusal is not None:
            self._parameters.check_addresses()
            return run_exact(self.program, bindings), PathPlan(0, None, self._refusal), None
        program = self._captured_program(bindings)
        rows = self.program.tokens(bindings)
        if self._has_tokens:
            assert rows is not None
            if capture_all and program.mode != "exact" and not program.padding_refused:
                self._capture(program, program.budgets)
            planned = self._plan(program, bindings, rows)
        else:
            sizes = sizes_of(self.program, bindings) + (() if rows is None else (rows,))
            planned = PathPlan(rows_of(sizes), None, MissReason.NEW_SHAPE, sizes=sizes)
        if planned.budget not in program.captured and planned.size not in program.unpadded:
            self._parameters.check_addresses()  # no replay does
        with self.pool.replaying():
            outputs, planned, budget = program.run(planned, bindings, capture_now=capture_all)
            if budget is None:
                return [*outputs], planned, None
            return own_outputs(self.program, outputs, bindings), planned, program.key(budget)


class SharedGraph:
    """Runs one graph for every module of a class, with a dispatcher for the parameters of each.

    `torch.compile` passes parameters as arguments, so that a second module of the same code runs the graph of
    the first. Whose a call is, the addresses of its first and its last parameter say: a backbone may be that
    of several modules, and so may a head.
    """

    def __init__(self, first: BudgetDispatcher) -> None:
        self._first = first
        self._ends_of = itemgetter(min(first.program.static_inputs), max(first.program.static_inputs))
        self._dispatchers: OrderedDict[tuple[int, int], BudgetDispatcher] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Runs the graph on its inputs, as the dispatcher of their module does."""
        first, last = ends = self._ends_of(args)
        addresses = first.data_ptr(), last.data_ptr()
        return (self._dispatchers.get(addresses) or self._dispatcher_of(ends, addresses))(args)

    def _dispatcher_of(self, ends: Sequence[torch.Tensor], addresses: tuple[int, int]) -> BudgetDispatcher:
        with self._lock:
            dispatcher = self._dispatchers.get(addresses)
            if dispatcher is None:  # no other thread has done it
                dispatcher = self._without_module() or self._another()
                dispatcher.ends = tuple(map(weakref.ref, ends))
                self._dispatchers[addresses] = dispatcher
        return dispatcher

    def _without_module(self) -> BudgetDispatcher | None:
        """Takes away a dispatcher whose module has other parameters now, or is no more."""
        for addresses, dispatcher in self._dispatchers.items():
            dispatcher.let_go()
            ends = (reference() for reference in dispatcher.ends)
            if any(each is None or each.data_ptr() not in addresses for each in ends):
                return self._dispatchers.pop(addresses)
        return None

    def _another(self) -> BudgetDispatcher:
        first = self._first
        if not self._dispatchers:
            return first
        if len(self._dispatchers) >= _MOST_MODULES:
            logger.warning("captures of the first of %d modules of a class are given up", _MOST_MODULES)
            _, oldest = self._dispatchers.popitem(last=False)
            oldest.clear()
            return oldest
        return BudgetDispatcher(first.program.for_others(), first.config, LiveWeights(), first.owners)


def _of_call(
    argument: Argument, shape: Sequence[Size] | None, replayed: Any, bindings: Bindings
) -> tuple[Any, Hashable]:
    """Returns a replayed output at its true size; and the memory that the next replay overwrites, by address
    and dtype, or None.
    """
    if isinstance(argument, Size):
        return argument(bindings.symbols), None
    if not isinstance(replayed, torch.Tensor):
        return replayed, None
    made_before = bindings.slots[argument.slot]
    if made_before is not None:  # before the region
        return made_before, None
    for dim, size in enumerate(shape or ()):
        if (true_size := size(bindings.symbols)) != replayed.shape[dim]:
            replayed = replayed.narrow(dim, 0, true_size)
    plain = replayed.resolve_conj().resolve_neg()
    return plain, (storage_address(plain), plain.dtype)


def own_outputs(program: Program, replayed: Sequence[Any], bindings: Bindings) -> list[Any]:
    """Copies the replayed outputs of a call at their true sizes (capture rule 7). Those that share memory, as
    a tensor and its view do, share a copy of it: what the caller writes to one is seen in the other.
    """
    each = zip(program.outputs, program.output_shapes, replayed, strict=True)
    found = [_of_call(*output, bindings) for output in each]
    own, copies, overwritten = [], [], []
    num_over = Counter(memory for _, memory in found)
    shared: dict[Hashable, torch.Tensor] = {}
    for value, memory in found:
        if memory is not None and num_over[memory] > 1:
            if memory not in shared:
                shared[memory] = value.new_empty(0).set_(value.untyped_storage().clone())
            value = shared[memory].as_strided(value.shape, value.stride(), value.storage_offset())
        elif memory is not None:
            overwritten.append(value)
            value = torch.empty_like(value)
            copies.append(value)
        own.append(value)
    copy_each(copies, overwritten)
    return own


def stats_of_compiled(compiled: Callable[..., Any]) -> ManagerStats:
    """Counts of all graphs of a compiled module or function, each call an item; calls that a wrapped tower's
    own forward served are misses. Dynamo's calls without this backend are not counted.
    """
    stats = ManagerStats.total(dispatcher.stats() for dispatcher in _dispatchers_of(compiled))
    calls: Counter[MissReason] = Counter(getattr(original_module(compiled), "eager_calls", ()))
    if not calls:
        return stats
    misses = dict(calls + Counter(stats.misses))
    runs = {**stats.fallback_runs, "eager": stats.fallback_runs.get("eager", 0) + calls.total()}
    return replace(stats, misses=misses, fallback_runs=runs)


def refresh_compiled(compiled: Callable[..., Any]) -> None:
    """As `fxsplit_encoder.refresh`, of a compiled module or function."""
    for dispatcher in _dispatchers_of(compiled):
        dispatcher.outdate_weights()
    getattr(original_module(compiled), "outdate_tables", lambda: None)()


def _dispatchers_of(compiled: Callable[..., Any]) -> list[BudgetDispatcher]:
    owners, module = set(map(id, owners_of(compiled))), original_module(compiled)
    is_module = isinstance(module, torch.nn.Module)
    tensors = {*map(id, (*module.parameters(), *module.buffers()))} if is_module else ()

    def is_own(dispatcher: BudgetDispatcher) -> bool:
        ends = [reference() for reference in dispatcher.ends] if is_module else []
        if ends and all(each is not None for each in ends):  # the graph may be that of another module
            return all(id(each) in tensors for each in ends)
        return any(id(reference()) in owners for reference in dispatcher.owners)

    return list(filter(is_own, dispatchers()))

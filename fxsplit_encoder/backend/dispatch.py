"""Budget dispatch: a call of a compiled graph becomes a padded replay, or the program at its exact shape."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fxsplit_encoder.attention import KernelChooser, KnownSegments, choosing
from fxsplit_encoder.backend.budgets import ProgramBudgets
from fxsplit_encoder.backend.requests import has_room, input_name, request_of_program, template_of
from fxsplit_encoder.capture import (
    BudgetLadder,
    CapturedForward,
    CaptureRequest,
    ExactShapes,
    GraphPool,
)
from fxsplit_encoder.capture.probe import probe_padding
from fxsplit_encoder.capture.runner import ExactRunner
from fxsplit_encoder.capture.segments import fits
from fxsplit_encoder.compile import Bindings, Program, Runner
from fxsplit_encoder.compile.program import Ref
from fxsplit_encoder.compile.sizes import Size, layout
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning import MissReason

logger = logging.getLogger(__name__)

# Forwards of other sizes than the token count whose captures are held, before all of them are given up.
_MOST_LADDERS = 32

_dispatchers: weakref.WeakSet[BudgetDispatcher] = weakref.WeakSet()
_warming = threading.local()


def dispatchers() -> list[BudgetDispatcher]:
    """The live dispatchers of this process, for statistics."""
    return list(_dispatchers)


@contextlib.contextmanager
def capturing_all() -> Iterator[list[BudgetDispatcher]]:
    """Every dispatcher called inside captures its whole ladder; yields those that did."""
    _warming.called = []
    try:
        yield _warming.called
    finally:
        _warming.called = None


class BudgetDispatcher:
    """Runs one program for whatever sizes come.

    On a call: the smallest fitting budget, captured on first use; pad, replay, cut to the true sizes, clone.
    Over the largest budget, or where padding is not allowed, the program runs at the exact shape; `misses`
    counts why.
    """

    def __init__(self, program: Program, config: EncoderConfig) -> None:
        self.program = program
        self.config = config
        self.pool = GraphPool(program.device, config.max_graph_bytes)
        self.kernels = KernelChooser(config.attention)
        self.kernels.check(program.device)
        self.hits = 0
        self.misses: Counter[MissReason] = Counter()
        self.padding_refusal: str | None = None
        """Why the region is never padded; None: it is, or it was not decided yet."""
        self._padding_allowed = program.padding.allowed
        self._ladders: dict[tuple[int, ...], BudgetLadder] = {}
        self._exact: dict[tuple[int, ...], ExactShapes] = {}
        self._static_inputs = sorted(program.static_inputs)
        self._addresses: list[int] = []
        self._layouts: list[tuple[Any, ...]] = []
        self._frame_lengths = program.frame_lengths_slot
        self._known_budgets: ProgramBudgets | None = None
        self._lock = threading.RLock()
        _dispatchers.add(self)

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Runs the graph on its inputs; the outputs are the caller's own (capture rule 7)."""
        with self._lock, choosing(self.kernels), torch.inference_mode(False), torch.no_grad():
            self._check_parameters(args)
            bindings = self.program.begin(args)
            warmed = getattr(_warming, "called", None)
            captured, reason = self._find(bindings, capture_all=warmed is not None)
            if warmed is not None:
                warmed.append(self)
            if captured is None:
                assert reason is not None
                self.misses[reason] += 1
                return self.program.finish(bindings, self._exact_runner(bindings))
            self.hits += 1
            return self._replay(captured, bindings)

    def _check_parameters(self, args: Sequence[Any]) -> None:
        """Captures hold parameters by address: where there are others now, it is redone (rule 6)."""
        try:
            addresses = list(map(torch.Tensor.data_ptr, map(args.__getitem__, self._static_inputs)))
        except TypeError:
            raise InputError(
                "parameters: expected those with which the module was compiled; got None in the place of "
                "one. Put it back, or compile again after torch._dynamo.reset()"
            ) from None
        if addresses != self._addresses:
            layouts = list(map(layout, map(args.__getitem__, self._static_inputs)))
            if self._addresses and layouts != self._layouts:
                raise InputError(
                    "parameters: expected them in the sizes, strides, dtype and device in which the module "
                    "was compiled; got others. Compile it again after torch._dynamo.reset()"
                )
            if self._ladders or self._exact:
                logger.warning("parameters were replaced since the capture; capturing again")
            self.clear()
            self._addresses, self._layouts = addresses, layouts

    def clear(self) -> None:
        """Releases every capture and its memory; the next calls capture again."""
        with self._lock:
            for ladder in self._ladders.values():
                ladder.clear()
            self._ladders.clear()
            for shapes in self._exact.values():
                shapes.clear()
            self._exact.clear()
            self.pool.retire()

    @property
    def num_captured(self) -> int:
        """Captures that are held."""
        budgets = sum(len(ladder.captured) for ladder in self._ladders.values())
        return budgets + sum(len(shapes.sizes) for shapes in self._exact.values())

    # --- which capture

    def _find(
        self, bindings: Bindings, *, capture_all: bool
    ) -> tuple[CapturedForward | None, MissReason | None]:
        if not self.config.enabled or self.config.mode == "none":
            return None, MissReason.DISABLED
        tokens = self.program.tokens(bindings)
        if tokens is None:
            return None, MissReason.STATIC_SHAPE
        if self.program.padding.capture_refusal:
            return None, MissReason.UNSUPPORTED_GRAPH
        if self.config.mode == "exact":
            return self._find_exact(bindings, tokens, capture_now=capture_all)
        budgets = self._budgets(bindings)
        if not self._may_pad(bindings):
            return self._find_unpadded(bindings, tokens, capture_now=capture_all)
        if capture_all:
            for budget in reversed(budgets.tokens):
                self._capture(bindings, budget)
        if tokens > budgets.rows(budgets.tokens[-1]):
            return None, MissReason.OVER_LARGEST_BUDGET
        roomy = [budget for budget in budgets.tokens if budgets.rows(budget) >= tokens]
        return self._smallest(bindings, tokens, roomy)

    def _smallest(
        self, bindings: Bindings, tokens: int, roomy: Sequence[int]
    ) -> tuple[CapturedForward | None, MissReason | None]:
        """The capture of the smallest of the budgets with room for the tokens that can serve the call."""
        ladder = self._ladder(bindings)
        reason = MissReason.NOT_CAPTURED
        for budget in roomy:
            if not self._segments_fit(bindings, tokens, budget):
                reason = MissReason.TOO_MANY_SEGMENTS
                continue
            if self._capture(bindings, budget) is not None:
                return ladder.best(budget, self._num_segments(bindings)), None
            if budget in ladder.exact:
                return None, MissReason.EXACT_IS_FASTER
        return None, reason

    def _capture(self, bindings: Bindings, budget: int) -> CapturedForward | None:
        """The capture of a budget, made on first use; None: there is none."""
        ladder = self._ladder(bindings)
        is_new = budget not in ladder.captured
        captured = ladder.capture(budget)
        if is_new and captured is not None and self.config.debug and not self.program.padding.proved:
            self._check_declaration(bindings, budget)
        return ladder.captured.get(budget)

    def _check_declaration(self, bindings: Bindings, budget: int) -> None:
        """Drops the capture of a tower that declares its padding if padding changes this call's results."""
        rows, tokens = self._budgets(bindings).rows(budget), self.program.tokens(bindings)
        if tokens is not None and tokens < rows:
            change = probe_padding(self.program, bindings, rows)
            if change is not None:
                self._ladder(bindings).drop(budget, f"the tower declares that it may be padded, but {change}")

    def _find_unpadded(
        self, bindings: Bindings, tokens: int, *, capture_now: bool
    ) -> tuple[CapturedForward | None, MissReason | None]:
        """The capture of a call that may not be padded: of a budget that it fills, or of its own size."""
        budgets = self._budgets(bindings)
        filled = [budget for budget in budgets.tokens if budgets.rows(budget) == tokens]
        captured, reason = self._smallest(bindings, tokens, filled) if filled else (None, None)
        if captured is None and reason is not MissReason.EXACT_IS_FASTER:
            captured, reason = self._find_exact(bindings, tokens, capture_now=capture_now)
        return captured, MissReason.PADDING_UNPROVED if reason is MissReason.NEW_SHAPE else reason

    def _find_exact(
        self, bindings: Bindings, tokens: int, *, capture_now: bool
    ) -> tuple[CapturedForward | None, MissReason | None]:
        """The capture of exactly so many tokens. No token is padded, so nothing need be proved of tokens."""
        program, budgets = self.program, self._budgets(bindings)
        key = self._other_sizes(bindings)
        if key not in self._exact:
            template = template_of(program, bindings)
            self._exact[key] = ExactShapes(
                lambda rows: request_of_program(program, template, rows, budgets.tokens_of(rows), budgets),
                program.device,
                threshold=self.config.exact_min_hits,
                max_captures=self.config.exact_max_graphs,
                max_bytes=lambda: self._bytes_left(key),
            )
        shapes = self._exact[key]
        ladder = shapes.find(tokens, math.inf if capture_now else 1.0)
        if ladder is None:
            return None, shapes.reason(tokens)
        if not self._segments_fit(bindings, tokens, budgets.tokens_of(tokens)):
            return None, MissReason.TOO_MANY_SEGMENTS
        return ladder.best(tokens, self._num_segments(bindings)), None

    def _bytes_left(self, key: tuple[int, ...]) -> int | None:
        """What captures at exact shapes with these other sizes may take, beside those with others."""
        limit = self.config.max_graph_bytes
        if limit is None:
            return None
        return limit - sum(shapes.num_bytes for other, shapes in self._exact.items() if other != key)

    def _budgets(self, bindings: Bindings) -> ProgramBudgets:
        if self._known_budgets is None:
            self._known_budgets = ProgramBudgets.of(self.program, self.config, bindings)
        return self._known_budgets

    def _segments_fit(self, bindings: Bindings, tokens: int, budget: int) -> bool:
        if not self.program.padding.segments_may_grow:
            return True  # captures have just as many as the call, which selects its ladder by their number
        budgets = self._budgets(bindings)
        return all(
            fits(
                bindings.slots[entry.slot].shape[0] - 1,
                tokens,
                budgets.segment_entries(entry.slot, budget),
                budgets.rows(budget),
            )
            for entry in self.program.region_inputs
            if entry.is_segments
        )

    def _num_segments(self, bindings: Bindings) -> int | None:
        """Images or frames of this call; None where no cumulative lengths tell."""
        slot = self._frame_lengths
        return bindings.slots[slot].shape[0] - 1 if slot is not None else None

    def _may_pad(self, bindings: Bindings) -> bool:
        """Whether padding is proved or declared; or, where the user asks for that, was seen to be harmless.

        Says once why it is not.
        """
        if self._padding_allowed or self.padding_refusal is not None:
            return self._padding_allowed
        padding = self.program.padding
        if self.config.padding == "probed" and padding.may_probe and not padding.refuted:
            return self._probe(bindings)
        self.padding_refusal = str(padding)
        where = f" ({padding.source})" if padding.source else ""
        logger.warning(
            "a graph is never padded, so only calls that fill a budget or repeat a size are replayed: real "
            "rows may depend on pad rows at %s%s",
            self.padding_refusal,
            where,
        )
        return False

    def _probe(self, bindings: Bindings) -> bool:
        """Whether padding changed no real row of this call, below some budget; decided once."""
        tokens = self.program.tokens(bindings)
        assert tokens is not None
        budgets = self._budgets(bindings)
        above = next((rows for rows in map(budgets.rows, budgets.tokens) if rows > tokens), None)
        if above is None or not has_room(self.program, bindings, above):
            return False
        padding = self.program.padding
        self.padding_refusal = probe_padding(self.program, bindings, above)
        self._padding_allowed = self.padding_refusal is None
        if self._padding_allowed:
            logger.warning(
                "padding: probed: a graph is padded since that changed no row of one call (%d tokens to %d); "
                "other data may give wrong results: nothing is known of %s",
                tokens,
                above,
                padding,
            )
        else:
            logger.warning("a graph is never padded (%s): %s", padding, self.padding_refusal)
        return self._padding_allowed

    # --- capture and replay

    def _ladder(self, bindings: Bindings) -> BudgetLadder:
        program, budgets = self.program, self._budgets(bindings)
        key = self._other_sizes(bindings)
        if key not in self._ladders:
            template = template_of(program, bindings)

            def request(budget: int) -> CaptureRequest:
                return request_of_program(program, template, budgets.rows(budget), budget, budgets)

            # There is a graph to break at its splitting ops already, and no untouched module any more.
            mode = "piecewise" if self.config.mode == "breakable" else self.config.mode
            self._ladders[key] = BudgetLadder(request, mode, self.pool)
        return self._ladders[key]

    def _other_sizes(self, bindings: Bindings) -> tuple[int, ...]:
        """Sizes other than the token count: they are part of a capture's shape, so they select its ladder."""
        key = tuple(bindings.symbols[symbol] for symbol in self.program.region_symbols)
        if key not in self._ladders and key not in self._exact:
            if len(self._ladders) + len(self._exact) >= _MOST_LADDERS:
                logger.warning("captures of %d other sizes are given up for new ones", _MOST_LADDERS)
                self.clear()
        return key

    def _replay(self, captured: CapturedForward, bindings: Bindings) -> list[Any]:
        program = self.program
        tokens = program.tokens(bindings)
        assert tokens is not None
        with self.pool.replaying():
            values = {input_name(entry.slot): bindings.slots[entry.slot] for entry in program.region_inputs}
            captured.load(values, tokens)
            outputs = captured.replay(debug=self.config.debug)
            own = [
                self._true_output(argument, info, output, bindings)
                for argument, info, output in zip(program.outputs, program.output_infos, outputs, strict=True)
            ]
            if self.config.debug:
                captured.pool.handed_out.add(tensor for tensor in own if isinstance(tensor, torch.Tensor))
            return own

    def _true_output(self, argument: Any, info: Any, output: Any, bindings: Bindings) -> Any:
        """An output at its true size, as the caller's own (capture rule 7)."""
        if isinstance(argument, Size):
            return argument(bindings.symbols)
        if not isinstance(output, torch.Tensor):
            return output
        assert isinstance(argument, Ref)
        if bindings.slots[argument.slot] is not None:
            return bindings.slots[argument.slot]  # made before the region
        true_output = output
        for dim, (size, captured) in enumerate(zip(info.shape, output.shape, strict=True)):
            if (true_size := size(bindings.symbols)) != captured:
                true_output = true_output.narrow(dim, 0, true_size)
        return true_output.clone()

    def _exact_runner(self, bindings: Bindings) -> Runner:
        """Brings the bindings to the device; a runner that knows the segments, where a host op has just
        computed their lengths.
        """
        slots = [entry.slot for entry in self.program.region_inputs if entry.is_segments]
        known = {s: bindings.slots[s].tolist() for s in slots if bindings.slots[s].device.type == "cpu"}
        self.program.move_to_device(bindings)
        return ExactRunner(KnownSegments(bindings.slots[slot], lengths) for slot, lengths in known.items())

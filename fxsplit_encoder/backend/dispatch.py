"""Budget dispatch: a call of a compiled graph becomes a padded replay, or the program at its exact shape."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.attention import KernelChooser, KnownSegments, choosing
from fxsplit_encoder.capture import (
    BudgetLadder,
    CapturedForward,
    CaptureRequest,
    ExactShapes,
    GraphPool,
    MissReason,
    RowCount,
    StaticBuffer,
    StaticParameters,
    generate_budgets,
    request_over,
    segment_capacity,
)
from fxsplit_encoder.capture.probe import padded_symbols, probe_padding
from fxsplit_encoder.capture.runner import ExactRunner
from fxsplit_encoder.capture.segments import fits, full_cu_seqlens
from fxsplit_encoder.compile import Frame, HostOp
from fxsplit_encoder.compile.program import Ref, resolve
from fxsplit_encoder.compile.sizes import Size
from fxsplit_encoder.errors import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from fxsplit_encoder.compile import Program, Runner
    from fxsplit_encoder.compile.program import RegionInput
    from fxsplit_encoder.config import EncoderConfig

logger = logging.getLogger(__name__)

# Without an adapter nothing says how large batches get; captures are lazy, so a long ladder costs nothing
# until used.
_UNKNOWN_RANGE = (1, 16384)

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
        self._padding_allowed = program.padding.proved
        self._ladders: dict[tuple[int, ...], BudgetLadder] = {}
        self._exact: dict[tuple[int, ...], ExactShapes] = {}
        self._static_inputs = sorted(program.static_inputs)
        self._addresses: list[int] = []
        self._layouts: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._frame_lengths = program.frame_lengths_slot
        self._segment_factors: dict[int, int] = {}
        self._known_budgets: tuple[list[int], int | Fraction] | None = None
        self._lock = threading.RLock()
        _dispatchers.add(self)

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Runs the graph on its inputs; the outputs are the caller's own (capture rule 7)."""
        with self._lock, choosing(self.kernels), torch.inference_mode(False), torch.no_grad():
            self._check_parameters(args)
            frame = self.program.begin(args)
            warmed = getattr(_warming, "called", None)
            captured, reason = self._find(frame, capture_all=warmed is not None)
            if warmed is not None:
                warmed.append(self)
            if captured is None:
                assert reason is not None
                self.misses[reason] += 1
                return self.program.finish(frame, self._exact_runner(frame))
            self.hits += 1
            return self._replay(captured, frame)

    def _check_parameters(self, args: Sequence[Any]) -> None:
        """Captures hold parameters by address: where there are others now, it is redone (rule 6)."""
        addresses = list(map(torch.Tensor.data_ptr, map(args.__getitem__, self._static_inputs)))
        if addresses != self._addresses:
            layouts = [(t.shape, t.dtype, t.device) for t in map(args.__getitem__, self._static_inputs)]
            if self._addresses and layouts != self._layouts:
                raise InputError(
                    "parameters: expected them in the sizes, dtype and device in which the module was "
                    "compiled; got others. Compile it again after torch._dynamo.reset()"
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

    def _find(self, frame: Frame, *, capture_all: bool) -> tuple[CapturedForward | None, MissReason | None]:
        if not self.config.enabled or self.config.mode == "none":
            return None, MissReason.DISABLED
        tokens = self.program.tokens(frame)
        if tokens is None:
            return None, MissReason.STATIC_SHAPE
        budgets, rows_per_token = self._budgets(frame)
        if self.config.mode == "exact":
            return self._find_exact(frame, tokens, rows_per_token)
        if capture_all and self._may_pad(frame, budgets, rows_per_token):
            ladder = self._ladder(frame, rows_per_token)
            for budget in reversed(budgets):
                ladder.capture(budget)
        if tokens > budgets[-1] * rows_per_token:
            return None, MissReason.OVER_LARGEST_BUDGET
        if not self._may_pad(frame, budgets, rows_per_token):
            return None, MissReason.PADDING_UNPROVED
        roomy = [budget for budget in budgets if budget * rows_per_token >= tokens]
        return self._smallest(frame, tokens, roomy, rows_per_token)

    def _smallest(
        self, frame: Frame, tokens: int, budgets: Sequence[int], rows_per_token: int | Fraction
    ) -> tuple[CapturedForward | None, MissReason | None]:
        """The capture of the smallest of the budgets with room for the tokens that can serve the call."""
        ladder = self._ladder(frame, rows_per_token)
        reason = MissReason.NOT_CAPTURED
        for budget in budgets:
            if not self._segments_fit(frame, tokens, budget, rows_per_token):
                reason = MissReason.TOO_MANY_SEGMENTS
                continue
            if ladder.capture(budget) is not None:
                return ladder.best(budget, self._num_segments(frame)), None
            if budget in ladder.exact:
                return None, MissReason.EXACT_IS_FASTER
        return None, reason

    def _find_exact(
        self, frame: Frame, tokens: int, rows_per_token: int | Fraction
    ) -> tuple[CapturedForward | None, MissReason | None]:
        """The capture of exactly so many tokens. Nothing is padded, so nothing need be proved."""
        key = self._other_sizes(frame)
        if key not in self._exact:
            template = self._template(frame)
            self._exact[key] = ExactShapes(
                lambda rows: self._request(template, rows, math.ceil(rows / rows_per_token)),
                self.program.device,
                threshold=self.config.exact_min_hits,
                max_captures=self.config.exact_max_graphs,
                max_bytes=lambda: self._bytes_left(key),
            )
        shapes = self._exact[key]
        ladder = shapes.find(tokens)
        if ladder is None:
            return None, shapes.reason(tokens)
        if not self._segments_fit(frame, tokens, math.ceil(tokens / rows_per_token), rows_per_token):
            return None, MissReason.TOO_MANY_SEGMENTS
        return ladder.best(tokens, self._num_segments(frame)), None

    def _bytes_left(self, key: tuple[int, ...]) -> int | None:
        """What captures at exact shapes with these other sizes may take, beside those with others."""
        limit = self.config.max_graph_bytes
        if limit is None:
            return None
        return limit - sum(shapes.num_bytes for other, shapes in self._exact.items() if other != key)

    def _budgets(self, frame: Frame) -> tuple[list[int], int | Fraction]:
        """The budgets, and how many rows of the token dimension one token of a budget stands for: host ops
        tell them of their tower, once.
        """
        if self._known_budgets is None:
            self._known_budgets = self._ask_for_budgets(frame)
        return self._known_budgets

    def _ask_for_budgets(self, frame: Frame) -> tuple[list[int], int | Fraction]:
        rows_per_token: int | Fraction = 1
        low, high = _UNKNOWN_RANGE
        for step in self.program.host_steps:
            assert isinstance(step.call, HostOp)
            args = [resolve(a, frame) for a in step.args]
            rows_per_token = step.call.rows_per_output_token(*args)
            low, high = step.call.budget_range(*args)
            if step.call.segment_factors is not None:
                factors = step.call.segment_factors(*args)
                self._segment_factors = dict(zip(step.outputs, factors, strict=True))
        budgets = list(self.config.token_budgets) or generate_budgets(low, high)
        if budgets[0] * rows_per_token < 1:
            raise ConfigError(
                f"token_budgets: {budgets[0]} has no room for an image; allowed: at least "
                f"{math.ceil(1 / rows_per_token)} output tokens"
            )
        return budgets, rows_per_token

    def _segments_fit(self, frame: Frame, tokens: int, budget: int, rows_per_token: int | Fraction) -> bool:
        rows = int(budget * rows_per_token)
        return all(
            fits(
                frame.slots[entry.slot].shape[0] - 1, tokens, self._segment_entries(entry.slot, budget), rows
            )
            for entry in self.program.region_inputs
            if entry.is_segments
        )

    def _num_segments(self, frame: Frame) -> int | None:
        """Images or frames of this call; None where no cumulative lengths tell."""
        slot = self._frame_lengths
        return frame.slots[slot].shape[0] - 1 if slot is not None else None

    def _segment_entries(self, slot: int, budget: int) -> int:
        """Entries of captured cumulative lengths. Only the number of images or frames is configured."""
        factor = self._segment_factors.get(slot, 1)
        most = self.config.max_items_per_batch if factor == 1 else 0
        return factor * segment_capacity(budget, most or budget) + 1

    def _may_pad(self, frame: Frame, budgets: Sequence[int], rows_per_token: int | Fraction) -> bool:
        """Whether padding is proved, or harmless by the probe, which runs once, below some budget."""
        if self._padding_allowed or self.padding_refusal is not None:
            return self._padding_allowed
        if not self.program.padding.may_probe:
            self.padding_refusal = str(self.program.padding)
            return False
        tokens = self.program.tokens(frame)
        assert tokens is not None
        above = next((int(b * rows_per_token) for b in budgets if int(b * rows_per_token) > tokens), None)
        if above is None:
            return False
        self.padding_refusal = probe_padding(self.program, frame, above)
        self._padding_allowed = self.padding_refusal is None
        if self.padding_refusal is not None:
            logger.warning("never padded (%s): %s", self.program.padding, self.padding_refusal)
        return self._padding_allowed

    # --- capture and replay

    def _ladder(self, frame: Frame, rows_per_token: int | Fraction) -> BudgetLadder:
        key = self._other_sizes(frame)
        if key not in self._ladders:
            template = self._template(frame)

            def request(budget: int) -> CaptureRequest:
                return self._request(template, int(budget * rows_per_token), budget)

            # There is a graph to break at its splitting ops already, and no untouched module any more.
            mode = "piecewise" if self.config.mode == "breakable" else self.config.mode
            self._ladders[key] = BudgetLadder(request, mode, self.pool)
        return self._ladders[key]

    def _other_sizes(self, frame: Frame) -> tuple[int, ...]:
        """Sizes other than the token count: they are part of a capture's shape, so they select its ladder."""
        key = tuple(frame.symbols[symbol] for symbol in self.program.region_symbols)
        if key not in self._ladders and key not in self._exact:
            if len(self._ladders) + len(self._exact) >= _MOST_LADDERS:
                logger.warning("captures of %d other sizes are given up for new ones", _MOST_LADDERS)
                self.clear()
        return key

    def _template(self, frame: Frame) -> Frame:
        """What every capture of these other sizes shares."""
        template = Frame([None] * self.program.num_slots, dict(frame.symbols))
        for slot in self.program.fixed_slots:
            template.slots[slot] = frame.slots[slot]
        return template

    def _request(self, template: Frame, rows: int, budget: int) -> CaptureRequest:
        """Of so many rows, with room for the segments of a budget."""
        program = self.program
        static = Frame(list(template.slots), padded_symbols(program, template, rows))
        buffers: dict[int, StaticBuffer] = {}
        for entry in program.region_inputs:
            buffers[entry.slot] = StaticBuffer(
                _name(entry.slot),
                self._example(entry, static, budget, rows),
                entry.token_dim,
                is_order=entry.is_order,
            )
        num_rows = None
        if program.num_rows_slot is not None:
            num_rows = RowCount(rows, program.device)
            static.slots[program.num_rows_slot] = num_rows.tensor
        frames = self._frame_lengths

        def forward(tensors: Mapping[str, Tensor], runner: Runner) -> list[Any]:
            slots = list(static.slots)
            for slot in buffers:
                slots[slot] = tensors[_name(slot)]
            return program.finish(Frame(slots, dict(static.symbols)), runner)

        return request_over(
            {buffer.name: buffer for buffer in buffers.values()},
            forward,
            parameters=StaticParameters(()),  # `_check_parameters` has seen every call's own
            segment_inputs=[_name(entry.slot) for entry in program.region_inputs if entry.is_segments],
            rows=rows,
            num_rows=num_rows,
            can_break=bool(program.splits),
            frame_lengths=None if frames is None else _name(frames),
        )

    def _example(self, entry: RegionInput, static: Frame, budget: int, rows: int) -> Tensor:
        """A tensor of the captured size, with contents to record and to time the capture with."""
        device, dtype = self.program.device, entry.info.dtype
        if entry.is_segments:
            room = self._segment_entries(entry.slot, budget) - 1
            segments = 1 if self._segment_factors.get(entry.slot, 1) == 1 else room
            return full_cu_seqlens(room, rows, segments).to(device, dtype)
        tensor = torch.zeros([s(static.symbols) for s in entry.info.shape], dtype=dtype, device=device)
        if tensor.is_floating_point():
            tensor.normal_()  # zeros would make the times that `auto` compares too short
        return tensor

    def _replay(self, captured: CapturedForward, frame: Frame) -> list[Any]:
        program = self.program
        tokens = program.tokens(frame)
        assert tokens is not None
        with self.pool.replaying():
            values = {_name(entry.slot): frame.slots[entry.slot] for entry in program.region_inputs}
            captured.load(values, tokens)
            outputs = captured.replay(debug=self.config.debug)
            own = [
                self._true_output(argument, info, output, frame)
                for argument, info, output in zip(program.outputs, program.output_infos, outputs, strict=True)
            ]
            if self.config.debug:
                captured.pool.handed_out.add(tensor for tensor in own if isinstance(tensor, torch.Tensor))
            return own

    def _true_output(self, argument: Any, info: Any, output: Any, frame: Frame) -> Any:
        """An output at its true size, as the caller's own (capture rule 7)."""
        if isinstance(argument, Size):
            return argument(frame.symbols)
        if not isinstance(output, torch.Tensor):
            return output
        assert isinstance(argument, Ref)
        if frame.slots[argument.slot] is not None:
            return frame.slots[argument.slot]  # made before the region
        true_output = output
        for dim, (size, captured) in enumerate(zip(info.shape, output.shape, strict=True)):
            if (true_size := size(frame.symbols)) != captured:
                true_output = true_output.narrow(dim, 0, true_size)
        return true_output.clone()

    def _exact_runner(self, frame: Frame) -> Runner:
        """Brings the frame to the device; a runner that knows the segments, where a host op has just computed
        their lengths.
        """
        slots = [entry.slot for entry in self.program.region_inputs if entry.is_segments]
        known = {s: frame.slots[s].tolist() for s in slots if frame.slots[s].device.type == "cpu"}
        self.program.move_to_device(frame)
        return ExactRunner(KnownSegments(frame.slots[slot], lengths) for slot, lengths in known.items())


def _name(slot: int) -> str:
    return f"input {slot}"

"""One path of a tower, at one combination of capture axes: its compiled forward, its captures, and how a
batch runs on it.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.attention import KnownSegments
from fxsplit_encoder.capture import (
    BudgetLadder,
    CapturedForward,
    CaptureRequest,
    GraphPool,
    SharedBuffers,
    StaticBuffer,
    StaticInputs,
    StaticParameters,
    measure_ms,
)
from fxsplit_encoder.capture.probe import probe_padding
from fxsplit_encoder.capture.runner import ExactRunner
from fxsplit_encoder.compile import BoundProgram, CompileOptions, Step, to_device, trace_forward
from fxsplit_encoder.errors import CaptureError, CompileError, InputError
from fxsplit_encoder.manager.budgets import CaptureKey
from fxsplit_encoder.manager.costs import RouteCosts

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from torch import Tensor

    from fxsplit_encoder.capture.buffers import StaticValue
    from fxsplit_encoder.compile import Runner
    from fxsplit_encoder.config import EncoderConfig
    from fxsplit_encoder.manager.budgets import Limits
    from fxsplit_encoder.manager.protocol import SupportsEncoderCudaGraph

logger = logging.getLogger(__name__)

# The trace runs the forward once, so it is made at a moderate size; the size is also Inductor's hint for its
# kernels.
_TRACED_TOKENS = 256

# Equal segments that a full budget is cut into to find what attention costs.
_MEASURED_SEGMENTS = 8


class EncoderPath:
    """Captures and runs one path, for items of one combination of axis keys.

    Its forward is the compiled program of the tower's `encoder_cudagraph_forward`; where that does not
    compile, the method itself, as a whole.
    """

    def __init__(
        self,
        name: str,
        tower: SupportsEncoderCudaGraph,
        config: EncoderConfig,
        limits: Limits,
        pool: GraphPool,
        device: torch.device,
        dtype: torch.dtype,
        axis_keys: tuple[Hashable, ...] = (),
    ) -> None:
        self.name = name
        self.axis_keys = axis_keys
        self.tower = tower
        self.budgets = limits.path_budgets[name]
        self.limits = limits
        self.device = device
        self.dtype = dtype
        path_config = config.paths.get(name)
        self.mode = (path_config.mode if path_config is not None else None) or config.mode
        self.options = CompileOptions(config.splitting_ops, config.piece_compiler)
        self.padding_logics = tower.get_encoder_cudagraph_config().padding_logics
        self.program: BoundProgram | None = None
        self.parameters = StaticParameters(())
        """Those that the program is bound to."""
        self.notes: list[str] = []
        self.ladder = BudgetLadder(self._request, self.mode, pool)
        self.shared = SharedBuffers()
        self.eager_costs: tuple[tuple[int, float], ...] = ()
        """(output tokens, milliseconds) of the tower's own forward, measured on a device."""
        self.attention_cost = 0.0
        """Milliseconds of a pair of rows that attend to one another, measured on a device."""
        self.rows_per_token = 1.0
        """Rows of the attended sequence for an output token."""
        self._compiled = False
        self.segment_room: dict[int, int] = {}
        """The attention segments that a captured budget holds; not there for a forward without any."""

    @property
    def label(self) -> str:
        """The path and its axis keys, for messages."""
        return f"path {self.name}" + (f" {self.axis_keys}" if self.axis_keys else "")

    def key(self, budget: int) -> CaptureKey:
        """What one of its budgets is called."""
        return CaptureKey(self.name, budget, self.axis_keys)

    # --- compile

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Traces and compiles the forward once, for all budgets; one that does not compile is kept whole."""
        if self._compiled:
            return
        self._compiled = True
        try:
            inputs = self._traced_values()
        except InputError as error:
            self.note(f"{self.label}: not compiled: {error}")
            return
        options = CompileOptions(self.options.splitting_ops, self.options.piece_compiler, progress)
        try:
            program = trace_forward(self._forward, inputs, self._dynamic_dims(inputs), options)
            if program.program.token_symbol is None:
                raise CompileError(
                    "it has no splitting op, so nothing tells which of its sizes counts tokens"
                )
            self._bind(program)
        except CompileError as error:
            self.note(f"{self.label}: captured without compiling: {error}")

    def _traced_values(self) -> dict[str, Tensor]:
        """Inputs of a moderate size, with two tiles rather than one: a trace makes a size of 1 a constant."""
        budgets = sorted(self.budgets, key=lambda budget: abs(budget - _TRACED_TOKENS))
        inputs = self._first_values(budgets)
        if any(tensor.dim() > 0 and tensor.shape[0] == 1 for tensor in inputs.values()):
            return self._first_values([2 * budget for budget in budgets])
        return inputs

    def _bind(self, program: BoundProgram) -> None:
        self.program = program
        fixed = (tensor for tensor in program.fixed if isinstance(tensor, torch.Tensor))
        self.parameters = StaticParameters(fixed, self.tower)

    def _current_program(self) -> BoundProgram | None:
        """The program on the parameters that the tower has now; None if it was not made for such as those."""
        if self.program is None or not self.parameters.have_moved():
            return self.program
        current = iter(self.parameters.current())
        fixed = [next(current) if isinstance(old, torch.Tensor) else old for old in self.program.fixed]
        if not all(_is_alike(old, new) for old, new in zip(self.program.fixed, fixed, strict=True)):
            return None
        self._bind(replace(self.program, fixed=tuple(fixed)))
        return self.program

    def _forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.tower.encoder_cudagraph_forward(dict(inputs), path=self.name)

    def _capture_values(self, budget: int) -> dict[str, Tensor]:
        """Fresh inputs of a budget; InputError: the tower cannot make them for these axis keys."""
        try:
            prepared = self.tower.prepare_encoder_cudagraph_capture_inputs(
                budget,
                self.limits.max_items_per_batch,
                self.limits.max_frames_per_batch,
                self.device,
                self.dtype,
                path=self.name,
                **({"axis_keys": self.axis_keys} if self.axis_keys else {}),
            )
        except ValueError as error:
            raise InputError(f"{self.label}: no inputs for {budget} tokens: {error}") from error
        return dict(prepared.values)

    def _first_values(self, budgets: Sequence[int]) -> dict[str, Tensor]:
        """Inputs of the first of these budgets for which the tower can make any; InputError: of none."""
        for budget in budgets[:-1]:
            with contextlib.suppress(InputError):
                return self._capture_values(budget)
        return self._capture_values(budgets[-1])

    def num_input_bytes(self, budget: int) -> int:
        """Memory of the static inputs of a budget.

        Raises:
            InputError: the tower cannot make inputs of this size for these axis keys.
        """
        values = self._capture_values(budget)
        return sum(tensor.numel() * tensor.element_size() for tensor in values.values())

    def item_token_range(self) -> tuple[int, int] | None:
        """The fewest and the most output tokens of one item on this path with these axis keys, from the
        tower's optional `get_encoder_cudagraph_item_token_range(path, axis_keys)`; None: not known.
        """
        token_range = getattr(self.tower, "get_encoder_cudagraph_item_token_range", None)
        return None if token_range is None else token_range(path=self.name, axis_keys=self.axis_keys)

    def _dynamic_dims(self, inputs: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """The dimensions that differ between two budgets; with one budget, the first of every tensor."""
        if len(self.budgets) < 2:
            return {name: [0] for name, tensor in inputs.items() if tensor.dim() > 0 and tensor.shape[0] > 1}
        small, large = self._first_values(self.budgets), self._first_values(self.budgets[::-1])
        return {
            name: [dim for dim, size in enumerate(tensor.shape) if size != large[name].shape[dim]]
            for name, tensor in small.items()
        }

    # --- capture

    def capture(self, budget: int) -> None:
        """Captures one budget, or notes why it is dropped."""
        self.ladder.capture(budget)
        if budget in self.ladder.dropped:
            self.note(f"{self.label}: budget {budget} is dropped: {self.ladder.dropped[budget]}")

    def drop(self, budget: int, reason: str) -> None:
        """Releases the captures of one budget."""
        self.ladder.drop(budget, reason)
        self.note(f"{self.label}: budget {budget} is dropped: {reason}")

    @property
    def input_bytes(self) -> int:
        """Memory of the static inputs of all captures, shared or not."""
        return sum(_input_storages(self.captured.values()).values())

    def num_bytes(self, budget: int) -> int:
        """Memory that one captured budget holds alone: its graphs, and static inputs that no other reads."""
        others = _input_storages(captured for other, captured in self.captured.items() if other != budget)
        own = _input_storages([self.captured[budget]])
        unshared = sum(num_bytes for address, num_bytes in own.items() if address not in others)
        return self.ladder.num_bytes(budget) + unshared

    @property
    def captured(self) -> dict[int, CapturedForward]:
        """The captures by budget."""
        return self.ladder.captured

    def _request(self, budget: int) -> CaptureRequest:
        try:
            values = self._capture_values(budget)
        except InputError as error:
            raise CaptureError(str(error)) from error
        program = self.program
        if program is None:
            return CaptureRequest(
                StaticInputs(
                    StaticBuffer(name, tensor, 0, self.padding_logics.get(name))
                    for name, tensor in values.items()
                ),
                StaticParameters.of_module(self.tower),
                (),
                budget,
                None,
                self._uncompiled(values),
                can_break=False,
            )
        rows = program.tokens(values)
        if rows is not None:
            self.rows_per_token = rows / budget
        self._check_padding(program, values, rows)
        buffers = {name: self._buffer(program, name, tensor) for name, tensor in values.items()}
        if program.segment_inputs:
            self.segment_room[budget] = min(values[name].shape[0] - 1 for name in program.segment_inputs)
        num_rows = torch.full((), rows, dtype=torch.int64, device=self.device) if rows is not None else None
        return self._request_over(program, buffers, budget if rows is None else rows, num_rows)

    def _buffer(self, program: BoundProgram, name: str, tensor: Tensor) -> StaticBuffer:
        """A static input; in shared memory, if it is one that every batch fills."""
        if name in program.segment_inputs:  # replaced as a whole
            return self.shared.share(StaticBuffer(name, tensor, None))
        dim = program.token_dims.get(name)
        buffer = StaticBuffer(
            name,
            tensor,
            0 if dim is None else dim,
            self.padding_logics.get(name),
            is_order=name in program.order_inputs,
        )
        return buffer if dim is None else self.shared.share(buffer)

    def _request_over(
        self, program: BoundProgram, buffers: dict[str, StaticBuffer], rows: int, num_rows: Tensor | None
    ) -> CaptureRequest:
        arguments = program.arguments({name: buffer.tensor for name, buffer in buffers.items()})

        def forward(runner: Runner) -> list[Any]:
            frame = program.program.begin(arguments)
            if program.program.num_rows_slot is not None:
                frame.slots[program.program.num_rows_slot] = num_rows
            return program.program.finish(frame, runner)

        name = program.frame_lengths

        def one_segment() -> CaptureRequest:
            assert name is not None
            lengths = torch.tensor([0, rows], dtype=torch.int32, device=self.device)
            return self._request_over(
                program, {**buffers, name: StaticBuffer(name, lengths, None)}, rows, num_rows
            )

        several = name is not None and buffers[name].tensor.shape[0] > 2
        return CaptureRequest(
            StaticInputs(buffers.values()),
            self.parameters,
            program.segment_inputs,
            rows,
            num_rows,
            forward,
            can_break=bool(program.program.splits),
            one_segment=one_segment if several else None,
        )

    def _uncompiled(self, values: Mapping[str, Tensor]) -> Callable[[Runner], Sequence[Any]]:
        """The tower's forward as a program of a single piece: what is recorded goes through the runner."""
        whole = Step(
            kind="piece",
            name="forward",
            call=lambda: (self._forward(values),),
            args=(),
            kwargs={},
            outputs=(0,),
            returns_tensor=False,
        )
        return lambda runner: runner.run_piece(whole, ())

    def _check_padding(self, program: BoundProgram, values: Mapping[str, Tensor], rows: int | None) -> None:
        """Raises CaptureError unless padding is proved, or the probe found it harmless on half the rows."""
        if program.program.padding.proved:
            return
        if rows is None or rows < 2 or not program.program.padding.may_probe:
            raise CaptureError(f"its rows are not known to be independent ({program.program.padding})")
        half = {
            name: _half(tensor, program.token_dims.get(name), program, name)
            for name, tensor in values.items()
        }
        refusal = probe_padding(program.program, program.program.begin(program.arguments(half)), rows)
        if refusal is not None:
            raise CaptureError(f"padding changes its results ({program.program.padding}): {refusal}")

    # --- costs

    def measure(self) -> None:
        """Times what no capture is needed for: the tower's own forward over a few sizes, and attention."""
        sizes = sorted({self.budgets[0], self.budgets[len(self.budgets) // 2], self.budgets[-1]})
        costs = []
        with torch.no_grad():
            for budget in sizes:
                try:
                    values = self._capture_values(budget)
                    costs.append((budget, measure_ms(lambda v=values: self._forward(v), self.device)))  # type: ignore[misc]
                    self._measure_attention(values)
                except InputError:  # the tower has no inputs of this size
                    continue
                except torch.OutOfMemoryError:
                    self.note(f"{self.label}: out of memory while {budget} tokens were timed")
                    break
        self.eager_costs = tuple(costs)

    def _measure_attention(self, values: dict[str, Tensor]) -> None:
        """From the same batch as one segment and as several of equal length."""
        program = self.program
        frames = program.frame_lengths if program is not None else None
        if program is None or frames is None:
            return
        rows = program.tokens(values)
        if rows is None or rows < _MEASURED_SEGMENTS:
            return

        def milliseconds(segments: int) -> float:
            cu_seqlens = (torch.arange(segments + 1) * rows // segments).to(torch.int32)
            on_device = cu_seqlens.to(self.device)
            inputs = {**values, frames: on_device}

            def run() -> Tensor:
                return program(inputs, ExactRunner([KnownSegments(on_device, cu_seqlens.tolist())]))

            return measure_ms(run, self.device)

        pairs = rows**2 * (1 - 1 / _MEASURED_SEGMENTS)
        self.attention_cost = max(0.0, (milliseconds(1) - milliseconds(_MEASURED_SEGMENTS)) / pairs)

    def costs(self) -> RouteCosts:
        """What was measured, or an order of preference where nothing was."""
        budgets = sorted(self.captured)
        measured = self.ladder.costs
        if not measured:
            return RouteCosts.unmeasured(budgets, self.segment_room)

        def beside_attention(budget: int, milliseconds: float) -> float:
            pairs = (budget * self.rows_per_token) ** 2
            return max(0.0, milliseconds - self.attention_cost * pairs)

        exact = tuple((b, beside_attention(b, costs.exact)) for b, costs in sorted(measured.items()))
        return RouteCosts(
            replay={b: beside_attention(b, measured[b].best) for b in budgets},
            one_segment={
                b: beside_attention(b, cost) for b in budgets if (cost := measured[b].one_segment) is not None
            },
            exact=exact if self.program is not None else (),
            eager=tuple((b, beside_attention(b, milliseconds)) for b, milliseconds in self.eager_costs),
            attention=self.attention_cost,
            room=self.segment_room,
        )

    # --- run

    def values(self, mm_kwargs: dict[str, Any]) -> dict[str, StaticValue | None]:
        """What a replay, or a run at the exact shape, needs of a batch."""
        prepared = self.tower.prepare_encoder_cudagraph_replay_buffers(
            mm_kwargs, self.limits.max_items_per_batch, self.limits.max_frames_per_batch, path=self.name
        )
        return dict(prepared.values)

    def best_capture(self, budget: int, values: Mapping[str, StaticValue | None]) -> CapturedForward:
        """What to replay for a batch of a captured budget.

        Raises:
            ReplayError: the tower gave no value for a buffer of the capture (capture rule 4).
        """
        name = self.program.frame_lengths if self.program is not None else None
        lengths = values.get(name) if name is not None else None
        single = isinstance(lengths, torch.Tensor) and lengths.shape[0] == 2
        captured = self.ladder.best(budget, 1 if single else None)
        captured.inputs.check_complete(values)
        return captured

    def load(self, captured: CapturedForward, values: Mapping[str, StaticValue | None]) -> None:
        """Fills a capture's buffers with a batch.

        Raises:
            ReplayError: the batch does not fit the capture; nothing was copied then (capture rule 3).
        """
        captured.load(values, self._rows(values))

    def run_exact(
        self, mm_kwargs: dict[str, Any], values: dict[str, StaticValue | None] | None = None
    ) -> tuple[Tensor, bool]:
        """The batch at its exact shape, and whether the compiled program ran: where its assumptions do not
        hold, the tower runs eagerly.
        """
        program = self._current_program()
        if program is not None:
            given = self.values(mm_kwargs) if values is None else values
            inputs = self._to_device(program, given)
            if inputs.keys() >= set(program.names) - {None} and self._accepts(program, inputs):
                segments = [
                    KnownSegments(inputs[name], cu_seqlens.tolist())
                    for name in program.segment_inputs
                    if isinstance(cu_seqlens := given[name], torch.Tensor) and not cu_seqlens.is_cuda
                ]
                return program(inputs, ExactRunner(segments)), True
        return self.run_eager(mm_kwargs), False

    def run_eager(self, mm_kwargs: dict[str, Any]) -> Tensor:
        """The batch through the tower itself."""
        return self.tower.encoder_eager_forward(mm_kwargs, path=self.name)

    def _accepts(self, program: BoundProgram, inputs: Mapping[str, Tensor]) -> bool:
        return program.program.accepts(program.symbols(inputs))

    def _to_device(
        self, program: BoundProgram, values: Mapping[str, StaticValue | None]
    ) -> dict[str, Tensor]:
        """The values, each in one tensor, in the dtypes that the program was traced with."""
        inputs = {}
        for name, value in values.items():
            if value is not None:
                tensor = value if isinstance(value, torch.Tensor) else torch.cat(list(value))
                dtype = program.dtypes.get(name, tensor.dtype)
                inputs[name] = to_device(tensor, self.device, dtype).contiguous()
        return inputs

    def _rows(self, values: Mapping[str, StaticValue | None]) -> int | None:
        """Rows of the batch, where its values tell."""
        present = {name: value for name, value in values.items() if value is not None}
        return self.program.tokens(present) if self.program is not None else None

    def clear(self) -> None:
        """Releases every capture. What is captured next reads the parameters that the tower has then."""
        self.ladder.clear()
        self.shared.clear()
        if self._current_program() is None:
            self.program = None
            self._compiled = False

    def note(self, note: str) -> None:
        """Remembers what was dropped or runs in another way than asked, and warns of it."""
        self.notes.append(note)
        logger.warning("%s", note)


def _input_storages(captures: Iterable[CapturedForward]) -> dict[int, int]:
    """The memory of the static inputs of some captures: address -> bytes."""
    return {
        storage.data_ptr(): storage.nbytes()
        for captured in captures
        for tensor in captured.inputs.tensors.values()
        if (storage := tensor.untyped_storage()).data_ptr()
    }


def _is_alike(old: Any, new: Any) -> bool:
    if not isinstance(old, torch.Tensor):
        return True
    return isinstance(new, torch.Tensor) and all(
        getattr(old, name) == getattr(new, name) for name in ("shape", "dtype", "device")
    )


def _half(tensor: Tensor, token_dim: int | None, program: BoundProgram, name: str) -> Tensor:
    if name in program.segment_inputs:
        return torch.div(tensor, 2, rounding_mode="floor").to(tensor.dtype)
    return tensor if token_dim is None else tensor.narrow(token_dim, 0, tensor.shape[token_dim] // 2)

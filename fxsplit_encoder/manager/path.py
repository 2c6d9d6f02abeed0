"""One path of a tower: its compiled forward, its captures, and how a batch runs on it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.capture import (
    BudgetLadder,
    CapturedForward,
    CaptureRequest,
    GraphPool,
    StaticBuffer,
    StaticInputs,
    StaticParameters,
)
from fxsplit_encoder.capture.probe import probe_padding
from fxsplit_encoder.capture.runner import ExactRunner
from fxsplit_encoder.capture.segments import longest_segment
from fxsplit_encoder.compile import DIRECT, BoundProgram, CompileOptions, Step, trace_forward
from fxsplit_encoder.errors import CaptureError, CompileError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from fxsplit_encoder.compile import Runner
    from fxsplit_encoder.config import EncoderConfig
    from fxsplit_encoder.manager.budgets import Limits
    from fxsplit_encoder.manager.protocol import SupportsEncoderCudaGraph

logger = logging.getLogger(__name__)

# The trace runs the forward once, so it is made at a moderate size; the size is also Inductor's hint for its
# kernels.
_TRACED_TOKENS = 256


class EncoderPath:
    """Captures and runs one path.

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
    ) -> None:
        self.name = name
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
        self._compiled = False
        self.segment_room: dict[int, int] = {}
        """The attention segments that a captured budget holds; not there for a forward without any."""

    # --- compile

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Traces and compiles the forward once, for all budgets; one that does not compile is kept whole."""
        if self._compiled:
            return
        self._compiled = True
        inputs = self._capture_values(min(self.budgets, key=lambda budget: abs(budget - _TRACED_TOKENS)))
        options = CompileOptions(self.options.splitting_ops, self.options.piece_compiler, progress)
        try:
            program = trace_forward(self._forward, inputs, self._dynamic_dims(inputs), options)
            if program.program.token_symbol is None:
                raise CompileError(
                    "it has no splitting op, so nothing tells which of its sizes counts tokens"
                )
            self._bind(program)
        except CompileError as error:
            self._note(f"path {self.name}: captured without compiling: {error}")

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
        prepared = self.tower.prepare_encoder_cudagraph_capture_inputs(
            budget,
            self.limits.max_items_per_batch,
            self.limits.max_frames_per_batch,
            self.device,
            self.dtype,
            path=self.name,
        )
        return dict(prepared.values)

    def _dynamic_dims(self, inputs: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """The dimensions that differ between two budgets; with one budget, the first of every tensor."""
        if len(self.budgets) < 2:
            return {name: [0] for name, tensor in inputs.items() if tensor.dim() > 0 and tensor.shape[0] > 1}
        small, large = self._capture_values(self.budgets[0]), self._capture_values(self.budgets[-1])
        return {
            name: [dim for dim, size in enumerate(tensor.shape) if size != large[name].shape[dim]]
            for name, tensor in small.items()
        }

    # --- capture

    def capture(self, budget: int) -> None:
        """Captures one budget, or notes why it is dropped."""
        self.ladder.capture(budget)
        if budget in self.ladder.dropped:
            self._note(f"path {self.name}: budget {budget} is dropped: {self.ladder.dropped[budget]}")

    @property
    def captured(self) -> dict[int, CapturedForward]:
        """The captures by budget."""
        return self.ladder.captured

    def _request(self, budget: int) -> CaptureRequest:
        values = self._capture_values(budget)
        program = self.program
        if program is None:
            return CaptureRequest(
                StaticInputs(StaticBuffer(name, tensor) for name, tensor in values.items()),
                StaticParameters.of_module(self.tower),
                (),
                budget,
                None,
                self._uncompiled(values),
                can_break=False,
            )
        rows = program.tokens(values)
        self._check_padding(program, values, rows)
        buffers = {n: StaticBuffer(n, tensor, _fill_dim(program, n, tensor)) for n, tensor in values.items()}
        if program.segment_inputs:
            self.segment_room[budget] = min(values[name].shape[0] - 1 for name in program.segment_inputs)
        num_rows = torch.full((), rows, dtype=torch.int64, device=self.device) if rows is not None else None
        return self._request_over(program, buffers, budget if rows is None else rows, num_rows)

    def _request_over(
        self, program: BoundProgram, buffers: dict[str, StaticBuffer], rows: int, num_rows: Tensor | None
    ) -> CaptureRequest:
        arguments = program.arguments({name: buffer.tensor for name, buffer in buffers.items()})

        def forward(runner: Runner) -> list[Any]:
            frame = program.program.begin(arguments)
            if program.program.num_rows_slot is not None:
                frame.slots[program.program.num_rows_slot] = num_rows
            return program.program.finish(frame, runner)

        def one_segment() -> CaptureRequest:
            name = program.segment_inputs[0]
            lengths = torch.tensor([0, rows], dtype=torch.int32, device=self.device)
            return self._request_over(
                program, {**buffers, name: StaticBuffer(name, lengths, None)}, rows, num_rows
            )

        several = len(program.segment_inputs) == 1 and buffers[program.segment_inputs[0]].tensor.shape[0] > 2
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

    # --- run

    def values(self, mm_kwargs: dict[str, Any]) -> dict[str, Tensor | None]:
        """What a replay, or a run at the exact shape, needs of a batch."""
        prepared = self.tower.prepare_encoder_cudagraph_replay_buffers(
            mm_kwargs, self.limits.max_items_per_batch, self.limits.max_frames_per_batch, path=self.name
        )
        return dict(prepared.values)

    def best_capture(self, budget: int, values: Mapping[str, Tensor | None]) -> CapturedForward:
        """What to replay for a batch of a captured budget.

        Raises:
            ReplayError: the tower gave no value for a buffer of the capture (capture rule 4).
        """
        segment_inputs = self.program.segment_inputs if self.program is not None else ()
        lengths = [values.get(name) for name in segment_inputs]
        single = len(lengths) == 1 and lengths[0] is not None and lengths[0].shape[0] == 2
        captured = self.ladder.best(budget, 1 if single else None)
        captured.inputs.check_complete(values)
        return captured

    def load(self, captured: CapturedForward, values: Mapping[str, Tensor | None]) -> None:
        """Fills a capture's buffers with a batch.

        Raises:
            ReplayError: the batch does not fit the capture; nothing was copied then (capture rule 3).
        """
        special = {
            name: value
            for name, value in values.items()
            if name in self.padding_logics and name not in captured.segment_inputs and value is not None
        }
        for name, value in special.items():
            captured.inputs.buffers[name].check(value)
        plain = {name: None if name in special else value for name, value in values.items()}
        captured.load(plain, self._rows(values))
        for name, value in special.items():
            self.padding_logics[name](captured.inputs.buffers[name].tensor, value)

    def run_exact(self, mm_kwargs: dict[str, Any], values: dict[str, Tensor | None] | None = None) -> Tensor:
        """The batch at its exact shape: the compiled program where its assumptions hold, else eagerly."""
        program = self._current_program()
        if program is not None:
            given = self.values(mm_kwargs) if values is None else values
            inputs = self._to_device(program, given)
            if inputs.keys() >= set(program.names) - {None} and self._accepts(program, inputs):
                lengths = [given[name] for name in program.segment_inputs]
                runner: Runner = DIRECT
                if len(lengths) == 1 and lengths[0] is not None and lengths[0].device.type == "cpu":
                    runner = ExactRunner(longest_segment(lengths[0]))
                return program(inputs, runner)
        return self.tower.encoder_eager_forward(mm_kwargs, path=self.name)

    def _accepts(self, program: BoundProgram, inputs: Mapping[str, Tensor]) -> bool:
        return program.program.accepts(program.symbols(inputs))

    def _to_device(self, program: BoundProgram, values: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The values in the dtypes that the program was traced with."""
        dtypes = {
            program.names[entry.slot]: entry.info.dtype
            for entry in program.program.region_inputs
            if entry.slot < len(program.names)
        }
        return {
            name: value.to(
                device=self.device, dtype=dtypes.get(name, value.dtype), non_blocking=True
            ).contiguous()
            for name, value in values.items()
            if value is not None
        }

    def _rows(self, values: Mapping[str, Tensor | None]) -> int | None:
        """Rows of the batch, where its values tell."""
        present = {name: value for name, value in values.items() if value is not None}
        return self.program.tokens(present) if self.program is not None else None

    def clear(self) -> None:
        """Releases every capture. What is captured next reads the parameters that the tower has then."""
        self.ladder.clear()
        if self._current_program() is None:
            self.program = None
            self._compiled = False

    def _note(self, note: str) -> None:
        self.notes.append(note)
        logger.warning("%s", note)


def _is_alike(old: Any, new: Any) -> bool:
    if not isinstance(old, torch.Tensor):
        return True
    return isinstance(new, torch.Tensor) and all(
        getattr(old, name) == getattr(new, name) for name in ("shape", "dtype", "device")
    )


def _fill_dim(program: BoundProgram, name: str, tensor: Tensor) -> int | None:
    """The dimension along which a replay fills a buffer; cumulative lengths are always replaced whole."""
    if name in program.segment_inputs:
        return None
    dim = program.token_dims.get(name)
    return dim if dim is not None or tensor.dim() == 0 else 0


def _half(tensor: Tensor, token_dim: int | None, program: BoundProgram, name: str) -> Tensor:
    if name in program.segment_inputs:
        return torch.div(tensor, 2, rounding_mode="floor").to(tensor.dtype)
    return tensor if token_dim is None else tensor.narrow(token_dim, 0, tensor.shape[token_dim] // 2)

"""One path of a tower, at one combination of capture axes: its captures, and how a batch runs on it."""

from __future__ import annotations

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
    MissReason,
    SharedBuffers,
    StaticBuffer,
    StaticInputs,
    StaticParameters,
    request_over,
)
from fxsplit_encoder.capture.probe import difference, probe_padding
from fxsplit_encoder.capture.runner import ExactRunner
from fxsplit_encoder.compile import BoundProgram, CompileOptions, Step
from fxsplit_encoder.errors import CaptureError, InputError
from fxsplit_encoder.manager.budgets import CaptureKey
from fxsplit_encoder.manager.exact_replays import ExactReplays
from fxsplit_encoder.manager.path_costs import PathCosts, measure_path
from fxsplit_encoder.manager.path_forward import PathForward
from fxsplit_encoder.manager.plan import PathPlan
from fxsplit_encoder.manager.tensor_parallel import agreement_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from fxsplit_encoder.capture.buffers import StaticValue
    from fxsplit_encoder.compile import Runner
    from fxsplit_encoder.config import EncoderConfig
    from fxsplit_encoder.manager.budgets import Limits
    from fxsplit_encoder.manager.costs import RouteCosts
    from fxsplit_encoder.manager.protocol import SupportsEncoderCudaGraph

logger = logging.getLogger(__name__)


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
        *,
        remaining_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.name = name
        self.axis_keys = axis_keys
        self.tower = tower
        self.budgets = limits.path_budgets[name]
        self.limits = limits
        self.device = device
        path_config = config.paths.get(name)
        self.mode = (path_config.mode if path_config is not None else None) or config.mode
        options = CompileOptions.of(config)
        self.forward = PathForward(name, self.label, tower, limits, device, dtype, axis_keys, options)
        self.padding_logics = tower.get_encoder_cudagraph_config().padding_logics
        self.notes: list[str] = []
        agree = agreement_of(tower)
        # The ranks of a sharded tower must capture and run the same, and their times differ.
        self.measured = agree is None and pool.is_cuda
        self.ladder = BudgetLadder(
            lambda budget: self._request(budget, self.shared), self.mode, pool, measured=self.measured
        )
        self.shared = SharedBuffers()
        self.exact: ExactReplays | None = None
        """Captures of the very token counts that come; None: this mode makes none."""
        if self.mode == "exact" or (self.mode == "auto" and self.measured):
            self.exact = ExactReplays(
                self._request,
                device,
                config,
                by_cost=self.mode == "auto",
                remaining_bytes=remaining_bytes,
                agree=agree,
                handed_out=pool.handed_out,
            )
        self.rows_per_token = 1.0
        """Rows of the attended sequence for an output token."""
        self.segment_room: dict[int, int] = {}
        """The attention segments that a captured budget holds; not there for a forward without any."""
        self._measured = PathCosts()

    @property
    def label(self) -> str:
        """The path and its axis keys, for messages."""
        return f"path {self.name}" + (f" {self.axis_keys}" if self.axis_keys else "")

    @property
    def program(self) -> BoundProgram | None:
        """The compiled forward; None before `compile`, and where it does not compile."""
        return self.forward.program

    def key(self, budget: int) -> CaptureKey:
        """What one of its budgets is called."""
        return CaptureKey(self.name, budget, self.axis_keys)

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Traces and compiles the forward once, for all budgets; one that does not compile is captured as it
        is. With mode `breakable` nothing is compiled.
        """
        if self.mode == "breakable":
            return
        refusal = self.forward.compile(self.budgets, progress)
        if refusal is not None:
            self.note(f"{self.label}: {refusal}")

    def num_input_bytes(self, budget: int) -> int:
        """Memory of the static inputs of a budget.

        Raises:
            InputError: the tower cannot make inputs of this size for these axis keys.
        """
        values = self.forward.capture_values(budget)
        return sum(tensor.numel() * tensor.element_size() for tensor in values.values())

    def item_token_range(self) -> tuple[int, int] | None:
        """The fewest and the most output tokens of one item on this path with these axis keys, from the
        tower's optional `get_encoder_cudagraph_item_token_range(path, axis_keys)`; None: not known.
        """
        token_range = getattr(self.tower, "get_encoder_cudagraph_item_token_range", None)
        return None if token_range is None else token_range(path=self.name, axis_keys=self.axis_keys)

    # --- capture

    def capture(self, budget: int) -> None:
        """Captures one budget, or notes why it is dropped."""
        self.ladder.capture(budget)
        if budget in self.captured and self.program is None:
            self._probe(budget)
        if budget in self.ladder.replaced:
            self.note(f"{self.label}: budget {budget} is {self.ladder.replaced[budget]}")
        if budget in self.ladder.dropped:
            self.note(f"{self.label}: budget {budget} is dropped: {self.ladder.dropped[budget]}")

    @torch.no_grad()
    def _probe(self, budget: int) -> None:
        """Drops the capture of a forward that nobody could analyse if padding changes its results, by a batch
        of half its tokens.
        """
        half = budget // 2
        try:
            values = self.forward.capture_values(half) if half else {}
        except InputError:
            return
        if not values:
            return
        captured = self.captured[budget]
        expected = self.forward(values)
        captured.load(values, None)
        output = captured.replay()[0]
        refusal = difference([expected], [output], "other")
        if refusal is not None:
            self.ladder.drop(budget, f"padding changes its results: {refusal}")

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
    def exact_bytes(self) -> int:
        """Memory of the captures at exact shapes."""
        return self.exact.num_bytes if self.exact is not None else 0

    @property
    def captured(self) -> dict[int, CapturedForward]:
        """The captures by budget."""
        return self.ladder.captured

    def _request(self, budget: int, shared: SharedBuffers) -> CaptureRequest:
        """The request of a budget over the inputs that budgets share, or of an exact shape over others."""
        try:
            values = self.forward.capture_values(budget)
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
                compiled=False,
                splitting_ops=self.forward.options.splitting_ops,
            )
        rows = program.tokens(values)
        if rows is not None:
            self.rows_per_token = rows / budget
        if shared is self.shared:
            self._check_padding(program, values, rows)
        buffers = {name: self._buffer(program, name, tensor, shared) for name, tensor in values.items()}
        if program.segment_inputs and shared is self.shared:
            self.segment_room[budget] = min(values[name].shape[0] - 1 for name in program.segment_inputs)
        num_rows = torch.full((), rows, dtype=torch.int64, device=self.device) if rows is not None else None

        def forward(tensors: Mapping[str, Tensor], runner: Runner) -> list[Any]:
            frame = program.program.begin(program.arguments(tensors))
            if program.program.num_rows_slot is not None:
                frame.slots[program.program.num_rows_slot] = num_rows
            return program.program.finish(frame, runner)

        return request_over(
            buffers,
            forward,
            parameters=self.forward.parameters,
            segment_inputs=program.segment_inputs,
            rows=budget if rows is None else rows,
            num_rows=num_rows,
            can_break=bool(program.program.splits),
            frame_lengths=program.frame_lengths,
        )

    def _buffer(
        self, program: BoundProgram, name: str, tensor: Tensor, shared: SharedBuffers
    ) -> StaticBuffer:
        """A static input; in shared memory, if it is one that every batch fills."""
        if name in program.segment_inputs:  # replaced as a whole
            return shared.share(StaticBuffer(name, tensor, None))
        dim = program.token_dims.get(name)
        buffer = StaticBuffer(
            name,
            tensor,
            0 if dim is None else dim,
            self.padding_logics.get(name),
            is_order=name in program.order_inputs,
        )
        return buffer if dim is None else shared.share(buffer)

    def _uncompiled(self, values: Mapping[str, Tensor]) -> Callable[[Runner], Sequence[Any]]:
        """The tower's forward as a program of a single piece: what is recorded goes through the runner."""
        whole = Step(
            kind="piece",
            name="forward",
            call=lambda: (self.forward(values),),
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
        if not self.measured:
            return
        self._measured = measure_path(self.forward, self.budgets, self.rows_per_token)
        if self._measured.out_of_memory is not None:
            self.note(f"{self.label}: out of memory while {self._measured.out_of_memory} tokens were timed")

    def costs(self) -> RouteCosts:
        """What was measured, or an order of preference where nothing was."""
        compiled = self.program is not None
        return self._measured.with_captures(self.ladder, self.segment_room, compiled=compiled)

    # --- run

    def values(self, mm_kwargs: dict[str, Any]) -> dict[str, StaticValue | None]:
        """What a replay, or a run at the exact shape, needs of a batch."""
        prepared = self.tower.prepare_encoder_cudagraph_replay_buffers(
            mm_kwargs, self.limits.max_items_per_batch, self.limits.max_frames_per_batch, path=self.name
        )
        return dict(prepared.values)

    def captures_for(self, planned: PathPlan) -> Iterator[tuple[CaptureKey, BudgetLadder, int]]:
        """What may serve a planned batch, the best first: a capture's key, what holds it, and its size."""
        if self.exact is not None and (ladder := self.exact.find(planned)) is not None:
            yield self.key(0), ladder, planned.tokens
        if planned.budget is not None and planned.budget in self.captured:
            yield self.key(planned.budget), self.ladder, planned.budget

    def best_capture(
        self, ladder: BudgetLadder, size: int, values: Mapping[str, StaticValue | None]
    ) -> CapturedForward:
        """What to replay of a captured size for a batch.

        Raises:
            ReplayError: the tower gave no value for a buffer of the capture (capture rule 4).
        """
        name = self.program.frame_lengths if self.program is not None else None
        lengths = values.get(name) if name is not None else None
        single = isinstance(lengths, torch.Tensor) and lengths.shape[0] == 2
        captured = ladder.best(size, 1 if single else None)
        captured.inputs.check_complete(values)
        return captured

    def as_served(self, planned: PathPlan) -> PathPlan:
        """A plan with what captures at exact shapes would change of it now."""
        if self.exact is None or planned.skipped:
            return planned
        if planned.tokens in self.exact.shapes:
            return PathPlan(planned.tokens, planned.tokens)
        return planned if planned.budget is not None else replace(planned, reason=self.miss_reason(planned))

    def miss_reason(self, planned: PathPlan) -> MissReason:
        """Why a planned batch that nothing served counts as a miss."""
        reason = self.exact.reason(planned) if self.exact is not None else None
        return reason or planned.reason or MissReason.NOT_CAPTURED

    def load(self, captured: CapturedForward, values: Mapping[str, StaticValue | None]) -> None:
        """Fills a capture's buffers with a batch.

        Raises:
            ReplayError: the batch does not fit the capture; nothing was copied then (capture rule 3).
        """
        if self.program is not None:
            self.program.program.derived.refresh()
        captured.load(values, self.forward.rows(values))

    def run_exact(
        self, mm_kwargs: dict[str, Any], values: dict[str, StaticValue | None] | None = None
    ) -> tuple[Tensor, bool]:
        """The batch at its exact shape, and whether the compiled program ran: where its assumptions do not
        hold, the tower runs eagerly.
        """
        program = self.forward.current_program()
        if program is not None:
            given = self.values(mm_kwargs) if values is None else values
            inputs = self.forward.inputs(program, given)
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

    def clear(self) -> None:
        """Releases every capture. What is captured next reads the parameters that the tower has then."""
        self.ladder.clear()
        self.shared.clear()
        if self.exact is not None:
            self.exact.clear()
        self.forward.refresh()

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


def _half(tensor: Tensor, token_dim: int | None, program: BoundProgram, name: str) -> Tensor:
    if name in program.segment_inputs:
        return torch.div(tensor, 2, rounding_mode="floor").to(tensor.dtype)
    return tensor if token_dim is None else tensor.narrow(token_dim, 0, tensor.shape[token_dim] // 2)

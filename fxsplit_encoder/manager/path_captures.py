"""The captures of one path of a tower, at one combination of capture axes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable

import torch

from fxsplit_encoder.capture import BudgetLadder, CapturedForward, CaptureRequest, GraphPool, SharedBuffers
from fxsplit_encoder.capture.probe import difference
from fxsplit_encoder.compile import BoundProgram, CompileOptions
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import CaptureError, InputError
from fxsplit_encoder.manager.exact_replays import ExactReplays
from fxsplit_encoder.manager.path_costs import MeasuredPath, measure_path
from fxsplit_encoder.manager.path_forward import PathForward
from fxsplit_encoder.manager.path_requests import request_of_module, request_of_program
from fxsplit_encoder.manager.tensor_parallel import agreement_of
from fxsplit_encoder.planning.costs import PathCosts
from fxsplit_encoder.planning.limits import CaptureKey, Limits
from fxsplit_encoder.protocol import BudgetGraphMetadata, SupportsEncoderCudaGraph

logger = logging.getLogger(__name__)


class PathCaptures:
    """What is captured of one path, for items of one combination of axis keys.

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
        self.declares_padding: bool = getattr(tower, "declares_padding", True)
        """Whether the tower's word is taken that padding leaves its real rows alone: that of any that
        implements the protocol itself, since padded replays are what the protocol describes."""
        self._debug = config.debug
        self.notes: list[str] = []
        agree = agreement_of(tower)
        # The ranks of a sharded tower must capture and run the same, and their times differ.
        self.measured = agree is None and pool.is_cuda

        def attention_ms(tokens: int) -> float:
            return self._measured.attention_ms(tokens)

        self.ladder = BudgetLadder(
            lambda budget: self._request(budget, self.shared),
            self.mode,
            pool,
            measured=self.measured,
            attention_ms=attention_ms,
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
                attention_ms=attention_ms,
            )
        self.segment_room: dict[int, int] = {}
        """The attention segments that a captured budget holds; not there for a forward without any."""
        self._measured = MeasuredPath()

    @property
    def label(self) -> str:
        """The path and its axis keys, for messages."""
        return f"path {self.name}" + (f" {self.axis_keys}" if self.axis_keys else "")

    @property
    def rows_per_token(self) -> float:
        """Rows of the attended sequence for an output token, as far as it was measured."""
        return self._measured.rows_per_token

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

    def input_bytes_by_name(self, budget: int) -> dict[str, int]:
        """Memory of every static input of a budget.

        Raises:
            InputError: the tower cannot make inputs of this size for these axis keys.
        """
        values = self.forward.capture_values(budget)
        return {name: tensor.numel() * tensor.element_size() for name, tensor in values.items()}

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
        if budget in self.captured and self._must_compare():
            self._compare_with_exact(budget)
        if budget in self.ladder.replaced:
            self.note(f"{self.label}: budget {budget} is {self.ladder.replaced[budget]}")
        if budget in self.ladder.dropped:
            self.note(f"{self.label}: budget {budget} is dropped: {self.ladder.dropped[budget]}")

    @property
    def padding_refused(self) -> bool:
        """Whether nothing is padded: a compiled forward is not proved to keep rows apart, nor declared to."""
        compiled = self.program is not None
        return compiled and not self._is_proved and not self.declares_padding

    @property
    def _is_proved(self) -> bool:
        return self.program is not None and self.program.program.padding.proved

    def _must_compare(self) -> bool:
        """Whether a capture has to show that padding leaves its results alone: where only the tower's word
        says so, with `debug`; where nothing does, since nobody could analyse the forward, always.
        """
        return not self._is_proved and (self._debug or not self.declares_padding)

    @torch.no_grad()
    def _compare_with_exact(self, budget: int) -> None:
        """Drops the capture of a budget if padding changes the results of a batch of half its tokens."""
        half = budget // 2
        try:
            values = self.forward.capture_values(half) if half else {}
        except InputError:
            return  # no batch is smaller, so nothing is ever padded
        if not values:
            return
        values = {name: _with_contents(tensor) for name, tensor in values.items()}
        captured = self.captured[budget]
        expected = self.forward(values)
        captured.load(values, self.forward.rows(values))
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
        return sum(
            {
                storage.data_ptr(): storage.nbytes()
                for captured in self.captured.values()
                for tensor in captured.inputs.tensors.values()
                if (storage := tensor.untyped_storage()).data_ptr()
            }.values()
        )

    def num_bytes(self, budget: int) -> int:
        """Memory that captures would need less without this budget: its graphs, and what no other reads of
        its static inputs.
        """
        others = _read_bytes(captured for other, captured in self.captured.items() if other != budget)
        own = _read_bytes([self.captured[budget]])
        unshared = (max(0, num_bytes - others.get(address, 0)) for address, num_bytes in own.items())
        return self.ladder.num_bytes(budget) + sum(unshared)

    @property
    def exact_bytes(self) -> int:
        """Memory of the captures at exact shapes."""
        return self.exact.num_bytes if self.exact is not None else 0

    @property
    def captured(self) -> dict[int, CapturedForward]:
        """The captures by budget."""
        return self.ladder.captured

    def metadata(self, budget: int) -> BudgetGraphMetadata:
        """What one captured budget is, in vLLM's terms."""
        captured = self.captured[budget]
        return BudgetGraphMetadata(
            token_budget=budget,
            max_batch_size=self.limits.max_items_per_batch,
            max_frames_per_batch=self.limits.max_frames_per_batch,
            graph=captured.capture,
            input_buffers=captured.inputs.tensors,
            output_buffer=captured.outputs[0],
            axis_keys=self.axis_keys,
            mode=captured.mode,
            graph_bytes=self.ladder.num_bytes(budget),
        )

    def _request(self, budget: int, shared: SharedBuffers) -> CaptureRequest:
        """The request of a budget over the inputs that budgets share, or of an exact shape over others."""
        try:
            growing = self.forward.growing_inputs(self.budgets)
            values = self.forward.capture_values(budget)
        except InputError as error:
            raise CaptureError(str(error)) from error
        program = self.program
        if program is None:
            return request_of_module(
                self.forward,
                values,
                budget,
                padding_logics=self.padding_logics,
                growing=growing,
                shared=shared,
            )
        if program.program.padding.capture_refusal:
            raise CaptureError(program.program.padding.capture_refusal)
        if self.padding_refused and (shared is self.shared or not program.program.padding.segments_may_grow):
            raise CaptureError(f"its rows are not known to be independent ({program.program.padding})")
        if shared is self.shared:
            if program.segment_inputs:
                self.segment_room[budget] = min(values[name].shape[0] - 1 for name in program.segment_inputs)
        return request_of_program(
            program,
            values,
            budget,
            parameters=self.forward.parameters,
            padding_logics=self.padding_logics,
            shared=shared,
        )

    # --- costs

    def measure(self) -> None:
        """Times what no capture is needed for, and captures are judged by: the tower's own forward over a few
        sizes, and attention.
        """
        if not self.measured:
            return
        self._measured = measure_path(self.forward, self.budgets)
        # While a capture is open torch frees none of the blocks that it keeps for later.
        torch.cuda.empty_cache()
        if self._measured.out_of_memory is not None:
            self.note(f"{self.label}: out of memory while {self._measured.out_of_memory} tokens were timed")

    def costs(self) -> PathCosts:
        """What was measured, or an order of preference where nothing was."""
        compiled = self.program is not None
        return self._measured.with_captures(self.ladder, self.segment_room, compiled=compiled)

    def clear(self) -> None:
        """Releases every capture. What is captured next reads the parameters that the tower has then."""
        self.ladder.clear()
        self.shared.clear()
        if self.exact is not None:
            self.exact.clear()
        self.forward.refresh()

    def note(self, note: str) -> None:
        """Remembers what was dropped or runs in another way than asked, and warns of it, once."""
        if note not in self.notes:
            self.notes.append(note)
            logger.warning("%s", note)


def _with_contents(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that tells something: zeros are the same wherever they come from."""
    if not tensor.is_floating_point() or bool(tensor.any()):
        return tensor
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=generator).to(tensor)


def _read_bytes(captures: Iterable[CapturedForward]) -> dict[int, int]:
    """What some captures read of the memory of static inputs: address -> bytes."""
    read: dict[int, int] = {}
    for captured in captures:
        for buffer in captured.inputs.buffers.values():
            read[buffer.address] = max(read.get(buffer.address, 0), buffer.num_bytes)
    return read

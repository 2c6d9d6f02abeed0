"""One path of a tower, at one combination of capture axes: its captures, and the runs of its batches."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxsplit_encoder.capture.buffers import StaticValue
from fxsplit_encoder.errors import ConfigError, FxSplitError, InputError, ReplayError
from fxsplit_encoder.kernels.attention import KnownSegments
from fxsplit_encoder.manager.path_forward import PathForward
from fxsplit_encoder.manager.tower import TowerSpec, read_item_specs, select_items
from fxsplit_encoder.planning.limits import CaptureKey
from fxsplit_encoder.planning.plan import PathPlan
from fxsplit_encoder.protocol import BudgetGraphMetadata
from fxsplit_encoder.runtime.captured_program import CapturedProgram
from fxsplit_encoder.runtime.measure import measure_forward, run_timed
from fxsplit_encoder.runtime.requests import CaptureScope

if TYPE_CHECKING:
    from fxsplit_encoder.compile.program import BoundProgram


class EncoderPath(CapturedProgram):
    """A path at one combination of axis keys: its compiled `encoder_cudagraph_forward`, or the method."""

    forward: PathForward

    def __init__(
        self, name: str, spec: TowerSpec, scope: CaptureScope, axis_keys: tuple[Hashable, ...] = ()
    ) -> None:
        self.name = name
        self.axis_keys = axis_keys
        self.tower = spec.tower
        self.limits = spec.limits
        self._keys: dict[int, CaptureKey] = {}
        config = scope.config
        own = config.paths.get(name)
        label = f"path {name}" + (f" {axis_keys}" if axis_keys else "")
        forward = PathForward(name, label, spec, scope, axis_keys)
        mode = (own.mode if own is not None else None) or config.mode
        super().__init__(forward, label, spec.limits.path_budgets[name], mode, scope)

    @property
    def program(self) -> BoundProgram | None:
        """The compiled forward; None before `compile`, or where it does not compile."""
        return self.forward.program

    def key(self, budget: int) -> CaptureKey:
        """Returns the key of a budget."""
        key = self._keys.get(budget)
        if key is None:
            key = self._keys[budget] = CaptureKey(self.name, budget, self.axis_keys)
        return key

    @property
    def is_to_compile(self) -> bool:
        """Whether `compile` traces and compiles the forward."""
        return self.mode != "breakable" and self.scope.config.compile and not self.scope.not_compiled

    def compile(
        self, progress: Callable[[int, int], None] | None = None, refusals: dict[str, str] | None = None
    ) -> None:
        """Compiles the forward once, if it is to be; ConfigError: it does not compile, with `invariant`."""
        if self.mode == "breakable" or not self.scope.config.compile:
            return
        refusal = self.scope.not_compiled or self.forward.compile(progress, refusals)
        if refusal is None:
            return
        if not self.scope.policy.own_forward_may_serve:
            raise ConfigError(f"invariant: {self.label}: the tower's own code would run: {refusal}")
        self.note(f"{self.label}: {refusal}")

    # --- capture

    def tokens_held(self, budget: int) -> int:
        """Returns the output tokens that a capture holds. A tower may make smaller inputs than asked for,
        such as whole tiles: these hold as many tokens as rows come out or, if the tower adds rows later, the
        fewest tokens that have inputs of the same shapes.
        """
        rows: int = self.captured[budget].outputs[0].shape[0]
        if rows >= budget:
            return budget
        shapes = self._input_shapes(budget)
        return max(rows, bisect_left(range(budget), True, 1, key=lambda n: self._input_shapes(n) == shapes))

    def _input_shapes(self, tokens: int) -> dict[str, torch.Size] | None:
        with contextlib.suppress(InputError):
            return {name: tensor.shape for name, tensor in self.forward.capture_values(tokens).items()}
        return None  # the tower makes no inputs of this size

    def metadata(self, budget: int) -> BudgetGraphMetadata:
        """Returns a captured budget in vLLM's terms."""
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

    def measure(self) -> None:
        """Times the forward without captures over a few sizes, and attention."""
        if not self.scope.measured:
            return
        if self.expected is not None:
            self.measured = self.expected.forward
            return
        self.measured = measure_forward(self.forward, self.budgets)
        if not self.scope.policy.own_forward_may_serve:  # however fast it is
            self.measured = replace(self.measured, eager=())
        # While a capture is open torch frees none of the blocks that it keeps for later.
        torch.cuda.empty_cache()
        if self.measured.out_of_memory is not None:
            self.note(f"{self.label}: out of memory while {self.measured.out_of_memory} tokens were timed")

    def run_timed(self) -> None:
        """Runs once what `measure` will time."""
        if self.scope.measured and self.expected is None:
            run_timed(self.forward, self.budgets)

    def clear(self) -> None:
        """Releases every capture, and binds the program to the tower's parameters now."""
        super().clear()
        self.forward.refresh()

    # --- one batch

    def values(self, mm_kwargs: dict[str, Any]) -> dict[str, StaticValue | None]:
        """Returns the tower's inputs of a batch; ReplayError: the captured extents do not hold them."""
        items, frames = self.limits.max_items_per_batch, self.limits.max_frames_per_batch
        try:
            prepared = self.tower.prepare_encoder_cudagraph_replay_buffers(
                mm_kwargs, items, frames, path=self.name
            )
        except (FxSplitError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError) as error:  # of a copy into a tensor of that extent, say
            raise ReplayError(
                f"the tower makes no inputs of this batch within {items} items and {frames} video frames: "
                f"{type(error).__name__}: {error}"
            ) from error
        for name in self.forward.unused:
            if prepared.values.get(name) is not None:
                raise ReplayError(f"{name}: this batch gives a value, and the tower gave None for captures")
        try:
            return self.forward.groups.spread(prepared.values)
        except InputError as error:
            raise ReplayError(str(error)) from error

    def rows(self, batch: Any, values: Mapping[str, StaticValue | None]) -> int | None:
        """Returns the rows of the attended sequence."""
        return self.forward.rows(values)

    def runs_compiled(self, planned: PathPlan) -> bool:
        """Returns whether there is a program and the plan is not eager."""
        return not planned.eager and self.forward.current_program() is not None

    def run_unpadded(
        self, mm_kwargs: dict[str, Any], values: Mapping[str, StaticValue | None]
    ) -> tuple[Sequence[Tensor], bool]:
        """Runs the batch at its exact shape, by the program or eagerly; returns its outputs and whether the
        program ran. With `invariant` a single item that the program does not take runs twice in one batch.
        """
        output = self._run_program(values)
        if output is None and self.scope.policy.repeats_single_items and self.program is not None:
            output = self._run_twice(mm_kwargs)
        return ([output], True) if output is not None else (self.run_eager(mm_kwargs), False)

    def _run_program(self, values: Mapping[str, StaticValue | None]) -> Tensor | None:
        program = self.forward.current_program()
        if program is None:
            return None
        inputs = self.forward.inputs(program, values)
        given = inputs.keys() >= set(program.names) - {None}
        if not (given and program.program.accepts(program.symbols(inputs))):
            return None
        segments = [
            KnownSegments(inputs[name], cu_seqlens.tolist())
            for name in program.region.segment_inputs
            if isinstance(cu_seqlens := values[name], torch.Tensor) and not cu_seqlens.is_cuda
        ]
        return program(inputs, segments)

    def _run_twice(self, mm_kwargs: dict[str, Any]) -> Tensor | None:
        if len(read_item_specs(self.tower, mm_kwargs)) != 1:
            return None
        twice, _ = select_items(self.tower, mm_kwargs, (0, 0), len(self.axis_keys))
        output = self._run_program(self.values(twice))
        return None if output is None else output[: output.shape[0] // 2]

    def run_eager(self, mm_kwargs: dict[str, Any]) -> Sequence[Tensor]:
        """Runs the batch through the tower's own forward; InputError: there is none, or `invariant`."""
        if not self.scope.policy.own_forward_may_serve:
            raise InputError(
                f"invariant: {self.label}: the compiled program does not take this batch, and the tower's "
                "own forward gives other bits; call compile() or capture() first, encode the items apart, or "
                "raise max_items_per_batch or max_frames_per_batch"
            )
        output: Tensor | None = self.tower.encoder_eager_forward(mm_kwargs, path=self.name)
        if output is None:
            raise InputError(
                f"tower: {type(self.tower).__name__}.encoder_eager_forward returned None; expected the rows "
                "of a batch that no capture holds: implement it, or list larger token_budgets"
            )
        return [output]

"""One path of a tower, at one combination of capture axes: its forward at any size, captures, and batches."""

from __future__ import annotations

import contextlib
import copy
import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.staging import to_device
from fxsplit_encoder._torch.tensors import traced_copy
from fxsplit_encoder.capture.breakable import refuse_collectives
from fxsplit_encoder.capture.buffers import SharedBuffers, StaticBuffer, StaticValue
from fxsplit_encoder.capture.forward import CapturedForward, CaptureRequest
from fxsplit_encoder.capture.inputs import StaticInputs, is_cumulative
from fxsplit_encoder.capture.parameters import StaticParameters
from fxsplit_encoder.compile.options import CompileOptions
from fxsplit_encoder.errors import (
    CaptureError,
    CompileError,
    ConfigError,
    FxSplitError,
    InputError,
    ReplayError,
    StartFileError,
    UntraceableError,
)
from fxsplit_encoder.kernels.attention import KnownSegments
from fxsplit_encoder.manager.tower import (
    RowGroups,
    TowerSpec,
    named_tensors,
    read_item_specs,
    select_items,
    tower_part,
    tower_tensors,
)
from fxsplit_encoder.pauses import FOREGROUND, has_turn, scheduler
from fxsplit_encoder.planning.limits import CaptureKey
from fxsplit_encoder.planning.plan import PathPlan
from fxsplit_encoder.protocol import BudgetGraphMetadata
from fxsplit_encoder.runtime.captured_program import CapturedProgram
from fxsplit_encoder.runtime.measure import measure_forward
from fxsplit_encoder.runtime.requests import CaptureScope, check_replacements, layouts_of, request_of_program

if TYPE_CHECKING:
    from fxsplit_encoder.compile.program import BoundProgram, NamedRegion

logger = logging.getLogger(__name__)

# The trace runs the forward once, so it is made at a moderate size; the size is also Inductor's hint for its
# kernels.
_TRACED_TOKENS = 256

# Relative to the largest output: padding may change the order of sums, never more than rounding.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class EncoderPath(CapturedProgram):
    """A path at one combination of axis keys: its compiled `encoder_cudagraph_forward`, or the method."""

    def __init__(
        self, name: str, spec: TowerSpec, scope: CaptureScope, axis_keys: tuple[Hashable, ...] = ()
    ) -> None:
        config = scope.config
        own = config.paths.get(name)
        label = f"path {name}" + (f" {axis_keys}" if axis_keys else "")
        mode = (own.mode if own is not None else None) or config.mode
        super().__init__(label, spec.limits.path_budgets[name], mode, scope)
        self.name = name
        self.axis_keys = axis_keys
        self.tower = spec.tower
        self.limits = spec.limits
        self.device, self.dtype = scope.pool.device, spec.dtype
        self.options = CompileOptions.of(config)
        self.padding_logics = spec.model_config.padding_logics
        self.declares_padding = getattr(spec.tower, "declares_padding", True)  # the default of the protocol
        self.program: BoundProgram | None = None
        """The compiled forward; None before `compile`, and where it does not compile."""
        self.parameters = StaticParameters(())
        """Parameters that the program is bound to."""
        self.refusal: str | None = None
        """Why it does not compile, once that is known."""
        self._varying: dict[str, list[int]] | None = None
        self.saved: str | None = None
        """The program that another process saved, which is restored rather than traced."""
        self.unused: dict[str, None] = {}
        """Inputs for which the tower gives None: captures are made without them."""
        self.groups = RowGroups()
        """Inputs whose rows are repeated for the program."""
        self._keys: dict[int, CaptureKey] = {}

    @property
    def region(self) -> NamedRegion | None:
        """The program's region."""
        return self.program.region if self.program is not None else None

    def key(self, budget: int) -> CaptureKey:
        """Returns the key of a budget."""
        key = self._keys.get(budget)
        if key is None:
            key = self._keys[budget] = CaptureKey(self.name, budget, self.axis_keys)
        return key

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Runs the tower's own forward."""
        given: dict[str, Any] = {**self.unused, **self.groups.gather(inputs)}
        return self.tower.encoder_cudagraph_forward(given, path=self.name)

    # --- inputs

    def capture_values(self, budget: int) -> dict[str, Tensor]:
        """Makes inputs of so many output tokens, without unused ones; InputError: the tower cannot."""
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
        values = {name: value for name, value in prepared.values.items() if value is not None}
        self.unused.update(dict.fromkeys(prepared.values.keys() - values.keys()))
        if varying := sorted(values.keys() & self.unused.keys()):
            raise InputError(
                f"{self.label}: {varying[0]} is a tensor for {budget} tokens and None for another number; "
                "expected the same inputs to be used at every size"
            )
        return self.groups.spread(values)

    def first_values(self, budgets: Sequence[int]) -> dict[str, Tensor]:
        """Makes inputs of the first of these budgets for which the tower can; InputError: for none."""
        for budget in budgets[:-1]:
            with contextlib.suppress(InputError):
                return self.capture_values(budget)
        return self.capture_values(budgets[-1])

    def inputs(self, program: BoundProgram, values: Mapping[str, StaticValue | None]) -> dict[str, Tensor]:
        """Returns the values, each in one tensor, on the devices and in the dtypes of the trace."""
        inputs = {}
        for name, value in values.items():
            if value is not None:
                tensor = value if isinstance(value, torch.Tensor) else torch.cat(list(value))
                device, dtype = program.placements.get(name, (self.device, tensor.dtype))
                inputs[name] = to_device(tensor, device, dtype).contiguous()
        return inputs

    def varying_dims(self) -> dict[str, list[int]]:
        """Returns by input the dimensions that differ between the smallest and largest budget; InputError:
        none are made.
        """
        if self._varying is None:
            small, large = self.first_values(self.budgets), self.first_values(self.budgets[::-1])
            self._varying = {
                name: [dim for dim, size in enumerate(tensor.shape) if size != large[name].shape[dim]]
                for name, tensor in small.items()
            }
        return self._varying

    def growing_inputs(self) -> frozenset[str]:
        """Returns inputs that differ between the smallest and largest budget; InputError: none are made."""
        if len(self.budgets) < 2:
            return frozenset()
        return frozenset(name for name, dims in self.varying_dims().items() if dims)

    def fixed_bytes(self) -> int:
        """Returns the bytes of inputs that do not grow; InputError: none are made."""
        growing, values = self.growing_inputs(), self.first_values(self.budgets)
        return sum(tensor.nbytes for name, tensor in values.items() if name not in growing)

    # --- compile

    @property
    def is_to_compile(self) -> bool:
        """Whether `compile` traces and compiles the forward."""
        return self.mode != "breakable" and self.scope.config.compile and not self.scope.not_compiled

    def compile(
        self, progress: Callable[[int, int], None] | None = None, refusals: dict[str, str] | None = None
    ) -> None:
        """Traces and compiles the forward once, for all sizes, if it is to be; notes why it does not compile.
        `refusals` say why paths of this tower do not, by their names, and of all by "": those are not tried
        again, and a new refusal is added. ConfigError: it does not compile, with `invariant`.
        """
        if self.mode == "breakable" or not self.scope.config.compile:
            return
        refusal = self.scope.not_compiled or self._compile(progress, {} if refusals is None else refusals)
        if refusal is None:
            return
        if self.scope.config.invariant:
            raise ConfigError(f"invariant: {self.label}: the tower's own code would run: {refusal}")
        self.note(f"{self.label}: {refusal}")

    def _compile(self, progress: Callable[[int, int], None] | None, refusals: dict[str, str]) -> str | None:
        """Returns why the forward does not compile, or None. Between requests the lock is held only while
        the tower itself runs.
        """
        self.restore()
        if self.is_settled:
            return self.refusal
        with has_turn():
            example = refusals.get(self.name, refusals.get("")) or self.example()
            if isinstance(example, str):
                return self.refuse(example)
        is_concurrent = scheduler() is not FOREGROUND
        traced = self.trace(example, progress, is_concurrent=is_concurrent)
        with has_turn():
            if is_concurrent and not isinstance(traced, FxSplitError):
                if not self.agrees(traced, example):
                    logger.warning("%s: traced again while requests wait: results differed", self.label)
                    traced = self.trace(example, progress)
            if not isinstance(traced, FxSplitError):
                self.bind(traced)
                return None
            refusals[self.name] = f"captured without compiling: {traced}"
            if isinstance(traced, UntraceableError):
                refusals[""] = f"captured without compiling, as path {self.name} is: {traced}"
            return self.refuse(refusals[self.name])

    @property
    def is_settled(self) -> bool:
        """Whether `compile` has run."""
        return self.program is not None or self.refusal is not None

    def example(self) -> dict[str, Tensor] | str:
        """Makes inputs to trace the forward with, of a moderate size; or says why there are none."""
        try:
            sizes = sorted({0, len(self.budgets) // 2, len(self.budgets) - 1})
            samples = [self.first_values(self.budgets[size:]) for size in sizes]
            self.groups = RowGroups.of(samples, self.padding_logics.keys())
            nearest = sorted(self.budgets, key=lambda budget: abs(budget - _TRACED_TOKENS))
            inputs = self.first_values(nearest)
            growing = self.growing_inputs() if len(self.budgets) > 1 else inputs.keys()
            if any(inputs[name].shape[:1] == (1,) for name in inputs.keys() & growing):
                # Two tiles rather than one: a trace makes a size of 1 a constant.
                return self.first_values([2 * budget for budget in nearest])
            return inputs
        except InputError as error:
            return f"not compiled: {error}"

    def restore(self) -> None:
        """Uses the saved program, if there is one that returns what the forward returns. Loading it and its
        first run, which take seconds, need no lock.
        """
        if self.saved is None or self.is_settled:
            return
        from fxsplit_encoder.compile.saved import restore_program

        saved, self.saved = self.saved, None  # it is for the parameters that the tower has now
        with has_turn():
            example = self.example()
        if isinstance(example, str):  # which `compile` says
            return
        try:
            program = restore_program(saved, named_tensors(self.tower), self.device)
            program(self.inputs(program, _with_contents(example)))
            with has_turn():
                if not self.agrees(program, example):
                    raise StartFileError("program: expected what the forward returns; got something else")
                self.bind(program)
        except Exception as error:  # the boundary of the process that compiled: torch, or a kernel, may fail
            logger.warning("%s: the saved start's program is not used, it is traced: %s", self.label, error)

    def trace(
        self,
        inputs: dict[str, Tensor],
        progress: Callable[[int, int], None] | None,
        *,
        is_concurrent: bool = False,
    ) -> BoundProgram | CaptureError | CompileError:
        """Compiles the forward; returns the program or the error. If `is_concurrent`, another thread runs the
        tower: modules that tracing treats specially are then copies, over the same parameters.
        """
        from fxsplit_encoder.compile.trace import trace_forward

        forward = self
        if is_concurrent and isinstance(self.tower, nn.Module):
            forward = copy.copy(self)
            twin: Any = traced_copy(self.tower)
            forward.tower = twin
        if len(self.budgets) > 1:
            dims = self.varying_dims()
        else:
            dims = {name: [0] for name, tensor in inputs.items() if tensor.dim() > 0 and tensor.shape[0] > 1}
        options = replace(self.options, progress=progress, requires_tokens=True)
        logger.info("%s: its forward is traced and compiled; compile: false goes without", self.label)
        try:
            program = trace_forward(forward.__call__, inputs, dims, options, tower_part(forward.tower))
            refuse_collectives(program.program.collectives)
            return program
        except (CaptureError, CompileError) as error:
            return error

    def refuse(self, why: str) -> str:
        """Notes why the forward is not compiled, and returns it."""
        self.refusal = why
        self.groups = RowGroups()
        return why

    @torch.no_grad()
    def agrees(self, program: BoundProgram, values: Mapping[str, Tensor]) -> bool:
        """Whether a program gives what the tower's own forward gives of these inputs."""
        values = _with_contents(values)
        return _difference(self(values), program(self.inputs(program, values))) is None

    def bind(self, program: BoundProgram) -> None:
        """Uses a program, on the parameters that it is bound to."""
        self.program = program
        self._layouts = layouts_of(program.fixed)  # now: a parameter may be cast or laid out anew in place
        self.parameters = StaticParameters(filter(torch.is_tensor, program.fixed), self.tower)

    def current_program(self) -> BoundProgram | None:
        """Returns the program on the tower's parameters now; InputError where their layouts have changed."""
        if self.program is None or not self.parameters.have_moved():
            return self.program
        old, now = self.program.fixed, iter(self.parameters.current())
        fixed = [next(now) if isinstance(x, torch.Tensor) else x for x in old]
        check_replacements(self._layouts, fixed, "Call clear() and capture() to compile the tower again")
        self.bind(replace(self.program, fixed=tuple(fixed)))
        return self.program

    def forget(self) -> None:
        """Makes the next `compile` compile the forward again."""
        self.program = self.refusal = self._varying = None

    # --- capture

    def request(self, tokens: int, shared: SharedBuffers) -> CaptureRequest:
        """Makes a capture request, with growing inputs in `shared`; CaptureError: not for this size."""
        program, logics = self.program, self.padding_logics
        if program is not None:
            padding = program.program.padding
            if refusal := padding.capture_refusal or padding.other_rows:
                raise CaptureError(refusal)
            if not (padding.segments_may_grow or padding.proved or self.declares_padding):
                # A capture serves every batch of its tokens, in however many segments.
                raise CaptureError(f"the code reads how its rows are cut into segments ({padding})")
        try:
            growing = self.growing_inputs()
            values = self.capture_values(tokens)
        except InputError as error:
            raise CaptureError(str(error)) from error
        if program is None:
            own = (
                StaticBuffer(name, tensor, 0, logics.get(name), may_be_left_out=name not in growing)
                for name, tensor in values.items()
            )
            inputs = StaticInputs(shared.share(each) if each.name in growing else each for each in own)
            tensors = inputs.tensors
            return CaptureRequest(
                inputs,
                lambda: (self(tensors),),
                StaticParameters(tower_tensors(self.tower), self.tower),
                tokens,
                lengths=[name for name in values if name not in logics and is_cumulative(values[name])],
                splitting_ops=self.options.splitting_ops,
                is_alone=self.scope.agree is None,
            )
        bindings = program.program.begin(program.arguments(values))
        return request_of_program(program.region, tokens, values, bindings, self.parameters, shared, logics)

    def is_always_full(self, tokens: int) -> bool:
        """Whether only batches of so many whole tiles take this budget."""
        return self.limits.is_always_full(self.name, tokens)

    @torch.no_grad()
    def padding_change(self, captured: CapturedForward, tokens: int) -> str | None:
        """Returns how padding changes the results of a capture; None: it does not."""
        batch = tokens if captured.must_be_full else tokens // 2
        try:
            values = self.capture_values(batch) if batch else {}
        except InputError:
            values = {}
        if not values or any(tensor.numel() == 0 for tensor in values.values()):
            return None  # no batch is smaller, so nothing is ever padded
        values = _with_contents(values)
        expected = self(values)
        with captured.inputs.kept_constants():
            captured.load(values, self.rows({}, values))
            return _difference(expected, captured.replay()[0])

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
            return {name: tensor.shape for name, tensor in self.capture_values(tokens).items()}
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
        self.measured = measure_forward(self, self.budgets)
        if self.scope.config.invariant:  # however fast it is
            self.measured = replace(self.measured, eager=())
        # While a capture is open torch frees none of the blocks that it keeps for later.
        torch.cuda.empty_cache()
        if self.measured.out_of_memory is not None:
            self.note(f"{self.label}: out of memory while {self.measured.out_of_memory} tokens were timed")

    def clear(self) -> None:
        """Releases every capture; binds the program to the tower's parameters now, or forgets it where their
        layouts have changed.
        """
        super().clear()
        try:
            self.current_program()
        except InputError:
            self.forget()

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
        for name in self.unused:
            if prepared.values.get(name) is not None:
                raise ReplayError(f"{name}: this batch gives a value, and the tower gave None for captures")
        try:
            return self.groups.spread(prepared.values)
        except InputError as error:
            raise ReplayError(str(error)) from error

    def rows(self, batch: Any, values: Mapping[str, StaticValue | None]) -> int | None:
        """Returns the rows of the attended sequence; None: not known."""
        return None if self.program is None else self.program.tokens(values)

    def runs_compiled(self, planned: PathPlan) -> bool:
        """Returns whether there is a program and the plan is not eager."""
        return not planned.eager and self.current_program() is not None

    def run_unpadded(
        self, mm_kwargs: dict[str, Any], values: Mapping[str, StaticValue | None]
    ) -> tuple[Sequence[Tensor], bool]:
        """Runs the batch at its exact shape, by the program or eagerly; returns its outputs and whether the
        program ran. With `invariant` a single item that the program does not take runs twice in one batch.
        """
        output = self._run_program(values)
        if output is None and self.scope.config.invariant and self.program is not None:
            output = self._run_twice(mm_kwargs)
        return ([output], True) if output is not None else (self.run_eager(mm_kwargs), False)

    def _run_program(self, values: Mapping[str, StaticValue | None]) -> Tensor | None:
        program = self.current_program()
        if program is None:
            return None
        inputs = self.inputs(program, values)
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
        if self.scope.config.invariant:
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


def _with_contents(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replaces tensors of zeros by random values, so that a comparison shows which rows are read."""
    contents = dict(values)
    for name, tensor in values.items():
        if tensor.is_floating_point() and not bool(tensor.any()):
            generator = torch.Generator().manual_seed(0)
            random = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
            contents[name] = random.to(tensor)
    return contents


def _difference(expected: Tensor, got: Tensor) -> str | None:
    """Returns how the real rows of a padded output differ by more than rounding; None: they do not."""
    real = got[tuple(slice(0, size) for size in expected.shape)]
    if real.shape != expected.shape:
        return f"the output has shape {tuple(got.shape)} when padded, {tuple(expected.shape)} when not"
    if not expected.numel():
        return None
    error = (expected.double() - real.double()).abs().max().item()
    scale = expected.double().abs().max().item()
    # A NaN compares false, so it counts as a difference.
    if not error <= _TOLERANCE.get(expected.dtype, 0.0) * max(scale, 1e-6):
        return f"the output changes by {error:.3g} when padded with other rows"
    return None

"""The forward of one path at one combination of axis keys: its inputs at any size, and its compilation."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.dispatch import check
from fxsplit_encoder._torch.staging import to_device
from fxsplit_encoder._torch.tensors import traced_copy
from fxsplit_encoder.capture.breakable import refuse_collectives
from fxsplit_encoder.capture.buffers import SharedBuffers, StaticValue
from fxsplit_encoder.capture.forward import CapturedForward, CaptureRequest
from fxsplit_encoder.capture.parameters import StaticParameters
from fxsplit_encoder.compile.options import CompileOptions
from fxsplit_encoder.errors import (
    CaptureError,
    CompileError,
    FxSplitError,
    InputError,
    StartFileError,
    UntraceableError,
)
from fxsplit_encoder.manager.tower import TowerSpec, named_tensors, tower_part, tower_tensors
from fxsplit_encoder.pauses import FOREGROUND, has_turn, scheduler
from fxsplit_encoder.runtime.requests import (
    CaptureScope,
    FreshInputs,
    check_replacements,
    layouts_of,
    request_of_module,
    request_of_program,
)

if TYPE_CHECKING:
    from fxsplit_encoder.compile.program import BoundProgram, NamedRegion

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value", bound="StaticValue | None")

# The trace runs the forward once, so it is made at a moderate size; the size is also Inductor's hint for its
# kernels.
_TRACED_TOKENS = 256

# Relative to the largest output: padding may change the order of sums, never more than rounding.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class PathForward:
    """The tower's `encoder_cudagraph_forward` on one path, and the program that it was compiled to. Messages
    name it by `label`, the path and its axis keys; inputs lie on the device of `scope`.
    """

    def __init__(
        self,
        name: str,
        label: str,
        spec: TowerSpec,
        scope: CaptureScope,
        axis_keys: tuple[Hashable, ...],
    ) -> None:
        self.name = name
        self.label = label
        self.tower = spec.tower
        self.limits = spec.limits
        self.budgets = spec.limits.path_budgets[name]
        self.device, self.dtype = scope.pool.device, spec.dtype
        self.axis_keys = axis_keys
        self.options = CompileOptions.of(scope.config)
        self.padding_logics = spec.model_config.padding_logics
        self.declares_padding: bool = getattr(spec.tower, "declares_padding", True)
        """Whether the tower declares that real rows do not read padding: the default of the protocol."""
        self.program: BoundProgram | None = None
        """The compiled forward; None before `compile`, and where it does not compile."""
        self.parameters = StaticParameters(())
        """Parameters that the program is bound to."""
        self.refusal: str | None = None
        """Why it does not compile, once that is known."""
        self._varying: dict[str, list[int]] | None = None
        self.saved: Mapping[str, Any] | None = None
        """The program that another process saved, which is restored rather than traced."""
        self.unused: dict[str, None] = {}
        """Inputs for which the tower gives None: captures are made without them."""
        self.groups = RowGroups()
        """Inputs whose rows are repeated for the program."""

    @property
    def region(self) -> NamedRegion | None:
        """The program's region."""
        return self.program.region if self.program is not None else None

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

    def rows(self, values: Mapping[str, StaticValue | None]) -> int | None:
        """Returns the rows of the attended sequence of a batch; None: not known."""
        return None if self.program is None else self.program.tokens(values)

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

    def request(self, tokens: int, shared: SharedBuffers) -> CaptureRequest:
        """Makes a capture request, with growing inputs in `shared`; CaptureError: not for this size."""
        try:
            growing = self.growing_inputs()
            values = self.capture_values(tokens)
        except InputError as error:
            raise CaptureError(str(error)) from error
        program, logics = self.program, self.padding_logics
        if program is None:
            return request_of_module(
                self,
                FreshInputs(tokens, values),
                StaticParameters(tower_tensors(self.tower), self.tower),
                shared,
                growing=growing,
                splitting_ops=self.options.splitting_ops,
                padding_logics=logics,
            )
        padding = program.program.padding
        if not (padding.segments_may_grow or padding.proved or self.declares_padding):
            # A capture serves every batch of its tokens, in however many segments.
            raise CaptureError(f"the code reads how its rows are cut into segments ({padding})")
        bindings = program.program.begin(program.arguments(values))
        fresh = FreshInputs(tokens, values, program.tokens(values), bindings)
        return request_of_program(program.region, fresh, self.parameters, shared, logics)

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
        values = with_contents(values)
        expected = self(values)
        with captured.inputs.kept_constants():
            captured.load(values, self.rows(values))
            return difference(expected, captured.replay()[0])

    # --- compile

    def compile(
        self, progress: Callable[[int, int], None] | None = None, refusals: dict[str, str] | None = None
    ) -> str | None:
        """Traces and compiles the forward once, for all sizes; returns why it does not compile, or None.
        `refusals` say why paths of this tower do not, by their names, and of all by "": those are not tried
        again, and a new refusal is added. Between requests the lock is held only while the tower itself runs.
        """
        self.restore()
        if self.is_settled:
            return self.refusal
        refusals = {} if refusals is None else refusals
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
        """Makes inputs to trace the forward with; or says why there are none."""
        try:
            self.groups = row_groups_of(self, self.padding_logics.keys())
            return _moderate_inputs(self)
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
            program(self.inputs(program, with_contents(example)))
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
        options = replace(self.options, progress=progress, requires_tokens=True)
        logger.info("%s: its forward is traced and compiled; compile: false goes without", self.label)
        try:
            program = trace_forward(
                forward.__call__, inputs, self._dynamic_dims(inputs), options, tower_part(forward.tower)
            )
            refuse_collectives(program.program.collectives)
            return program
        except (CaptureError, CompileError) as error:
            return error

    def _dynamic_dims(self, inputs: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Returns the dimensions that vary; with one budget, the first of every tensor."""
        if len(self.budgets) > 1:
            return self.varying_dims()
        return {name: [0] for name, tensor in inputs.items() if tensor.dim() > 0 and tensor.shape[0] > 1}

    def refuse(self, why: str) -> str:
        """Notes why the forward is not compiled, and returns it."""
        self.refusal = why
        self.groups = RowGroups()
        return why

    def to_save(self) -> dict[str, Any]:
        """Returns the program for `saved` of another process; CompileError where it cannot be saved."""
        from fxsplit_encoder.compile.saved import save_program

        assert self.program is not None
        return save_program(self.program, named_tensors(self.tower))

    @torch.no_grad()
    def agrees(self, program: BoundProgram, values: Mapping[str, Tensor]) -> bool:
        """Whether a program gives what the tower's own forward gives of these inputs."""
        values = with_contents(values)
        return difference(self(values), program(self.inputs(program, values))) is None

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

    def refresh(self) -> None:
        """Binds the program to the tower's parameters now; forgets it where their layouts have changed."""
        try:
            self.current_program()
        except InputError:
            self.forget()

    def forget(self) -> None:
        """Makes the next `compile` compile the forward again."""
        self.program = self.refusal = self._varying = None


class RowGroups:
    """The inputs with one row for several patches, such as a row a token.

    Traced as they are, the graph would have two counts of tokens. So such an input enters the graph with its
    rows repeated for each patch, and the forward takes one of them. `factors` are patches per row, by the
    names of these inputs; `patches` are the inputs with a row a patch.
    """

    def __init__(self, factors: Mapping[str, int] | None = None, patches: Sequence[str] = ()) -> None:
        self.factors = dict(factors or {})
        self.patches = tuple(patches)

    @classmethod
    def of(cls, samples: Sequence[Mapping[str, Tensor]]) -> RowGroups:
        """Finds the factors that hold in all samples of a forward's inputs, of different sizes."""
        rows = {
            name: [sample[name].shape[0] for sample in samples]
            for name, tensor in samples[0].items()
            if tensor.dim() > 0
        }
        growing = {name: counts for name, counts in rows.items() if len(set(counts)) > 1}
        if not growing:
            return cls()
        most = max(growing.values(), key=lambda counts: counts[0])
        factors = {
            name: most[0] // counts[0]
            for name, counts in growing.items()
            if 0 < counts[0] < most[0] and most == [most[0] // counts[0] * count for count in counts]
        }
        return cls(factors, [name for name, counts in growing.items() if counts == most])

    def spread(self, values: Mapping[str, _Value]) -> dict[str, _Value]:
        """Repeats rows for each patch; InputError: an input has another number of rows for these patches."""
        if not self.factors:
            return dict(values)
        self._check(values)
        return {name: self._spread(name, value) for name, value in values.items()}

    def gather(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undoes `spread`."""
        if not self.factors:
            return dict(inputs)
        gathered = dict(inputs)
        rows = inputs[self.patches[0]].shape[0]
        for name in (*self.factors, *self.patches):
            check(inputs[name].shape[0] == rows)
        for name, factor in self.factors.items():
            gathered[name] = inputs[name].unflatten(0, (-1, factor))[:, 0]
        return gathered

    def _check(self, values: Mapping[str, StaticValue | None]) -> None:
        # What the samples had in proportion may be so by chance.
        given = [value for name in self.patches if (value := values.get(name)) is not None]
        for name, factor in self.factors.items():
            value = values.get(name)
            if value is not None and given and factor * _num_rows(value) != _num_rows(given[0]):
                raise InputError(
                    f"{name}: expected a row for every {factor} of {_num_rows(given[0])} patches, as in the "
                    f"inputs that the tower makes for captures; got {_num_rows(value)}"
                )

    def _spread(self, name: str, value: Any) -> Any:
        factor = self.factors.get(name)
        if factor is None or value is None:
            return value
        if isinstance(value, Tensor):
            return value.repeat_interleave(factor, dim=0)
        return [part.repeat_interleave(factor, dim=0) for part in value]


def _num_rows(value: StaticValue) -> int:
    return value.shape[0] if isinstance(value, Tensor) else sum(part.shape[0] for part in value)


def _moderate_inputs(sized: PathForward) -> dict[str, Tensor]:
    """Inputs of a moderate size, with two tiles rather than one: a trace makes a size of 1 a constant."""
    nearest = sorted(sized.budgets, key=lambda budget: abs(budget - _TRACED_TOKENS))
    inputs = sized.first_values(nearest)
    growing = sized.growing_inputs() if len(sized.budgets) > 1 else inputs.keys()
    if any(inputs[name].shape[:1] == (1,) for name in inputs.keys() & growing):
        return sized.first_values([2 * budget for budget in nearest])
    return inputs


def row_groups_of(sized: PathForward, without: Collection[str]) -> RowGroups:
    """Finds the inputs with a row for a group of patches, but for those `without`, from three budgets."""
    budgets = sized.budgets
    sizes = {0, len(budgets) // 2, len(budgets) - 1}
    if len(sizes) < 2:
        return RowGroups()
    samples = [sized.first_values(budgets[size:]) for size in sorted(sizes)]
    return RowGroups.of([{n: v for n, v in each.items() if n not in without} for each in samples])


def with_contents(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replaces tensors of zeros by random values, so that a comparison shows which rows are read."""
    contents = dict(values)
    for name, tensor in values.items():
        if tensor.is_floating_point() and not bool(tensor.any()):
            generator = torch.Generator().manual_seed(0)
            random = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
            contents[name] = random.to(tensor)
    return contents


def difference(expected: Tensor, got: Tensor) -> str | None:
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

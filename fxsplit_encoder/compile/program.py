"""Runs a forward as ordered steps, whose values live in numbered slots.

The steps up to the last host op are the *prologue* and always run at the true shape; the rest is the
*region*, which may run padded, and which `capture` records step by step. `bind` names a program's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.staging import to_device
from fxsplit_encoder.compile.branches import Step, StepBranches
from fxsplit_encoder.compile.derived import DerivedParameters
from fxsplit_encoder.compile.sizes import Size, SymbolValues
from fxsplit_encoder.errors import CompileError
from fxsplit_encoder.kernels.attention import KnownSegments, varlen_attention

if TYPE_CHECKING:  # its module imports sympy, which no replay needs
    from fxsplit_encoder.compile.padding import PaddingReport


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the value of a slot."""

    slot: int


Argument = Any
"""A `Ref`, a `Size`, a constant, or a list or tuple of these."""


@dataclass(frozen=True, slots=True)
class RegionInput:
    """A tensor that enters the region and changes from call to call."""

    slot: int
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    """For which pieces are compiled."""
    dtype: torch.dtype
    device: torch.device
    is_segments: bool
    """Whether it is the cumulative lengths of a varlen attention."""
    token_dim: int | None
    """The dimension that counts tokens, if any."""
    is_permutation: bool = False
    """Whether it is a permutation of rows, see `permute_rows`."""


@dataclass(slots=True)
class Bindings:
    """Slots and symbols of one run."""

    slots: list[Any]
    symbols: SymbolValues = field(default_factory=dict)

    def copy(self) -> Bindings:
        """Returns the same values for another run."""
        return Bindings(list(self.slots), dict(self.symbols))

    def value(self, argument: Argument) -> Any:
        """Returns an argument's value in this run."""
        if isinstance(argument, Ref):
            return self.slots[argument.slot]
        if isinstance(argument, Size):
            return argument(self.symbols)
        if isinstance(argument, list | tuple):
            return type(argument)(self.value(each) for each in argument)
        return argument

    def arguments(self, step: Step) -> tuple[list[Any], dict[str, Any]]:
        """Returns the positional and named arguments of a step."""
        value = self.value
        return [value(each) for each in step.args], {key: value(each) for key, each in step.kwargs.items()}

    def store(self, step: Step, result: Any) -> None:
        """Stores a step's results and drops the values that no later step reads."""
        slots = self.slots
        results = result if isinstance(result, list | tuple) else (result,)
        for slot, value in zip(step.outputs, results, strict=False):
            if slot >= 0:
                slots[slot] = value
        for slot in step.frees:
            slots[slot] = None


@dataclass(frozen=True, slots=True)
class Program:
    """A traced forward, split and compiled for any size. Slots 0..num_inputs-1 are the graph's inputs."""

    steps: tuple[Step, ...]
    num_inputs: int
    num_slots: int
    num_rows_slot: int | None
    """Slot of the number of real rows, a 0-dimensional int64 tensor, for the masks of pad rows."""
    constants: Mapping[int, Tensor]
    """Tensors lifted out of the graph, by slot."""
    static_inputs: frozenset[int]
    """Inputs that are parameters or buffers: bound by address when captured."""
    symbol_sources: tuple[tuple[str, int, int], ...]
    """(symbol, input, dimension) for each symbol of a size; dimension -1: the input is the number."""
    outputs: tuple[Argument, ...]
    output_shapes: tuple[tuple[Size, ...] | None, ...]
    input_shapes: tuple[tuple[Size, ...] | None, ...]
    """Traced shapes; None for numbers."""
    token_symbol: str | None
    """The symbol of the token dimension; None: the sizes of the splitting ops name none."""
    region_start: int
    region_inputs: tuple[RegionInput, ...]
    region_symbols: tuple[str, ...]
    """Symbols of sizes inside the region, without the token symbol."""
    device: torch.device
    padding: PaddingReport
    accepts: Callable[[SymbolValues], bool]
    """Whether the guards of the trace hold for these symbol values."""
    derived: DerivedParameters = field(default_factory=DerivedParameters)
    """Parameters that passes keep in another form."""
    collectives: tuple[str, ...] = ()
    """The ops that other ranks have to call as well."""
    pass_report: Mapping[str, int] = field(default_factory=dict)
    """Number of places that each pass changed."""

    def may_be_captured(self, symbols: SymbolValues) -> bool:
        """Whether the traced graph is valid at these sizes. A trace takes no size for 1,
        but a run of n tokens is the first n rows of 2n, by the padding proof or the tower's declaration.
        """
        if self.accepts(symbols):
            return True
        if self.token_symbol is None:
            return False
        tokens = symbols[self.token_symbol]
        twice = {**symbols, self.token_symbol: 2 * tokens}
        return tokens % self.padding.divisor == 0 and self.accepts(twice)

    def for_others(self) -> Program:
        """Returns the program for other parameters, from which it derives its own."""
        return replace(self, derived=DerivedParameters(self.derived.recipes))

    def begin(self, args: Sequence[Any]) -> Bindings:
        """Binds the graph's inputs and runs the prologue at the true shape; results may be on the CPU."""
        bindings = Bindings([*args, *([None] * (self.num_slots - len(args)))])
        for slot, constant in self.constants.items():
            bindings.slots[slot] = constant
        self.derived.fill(bindings.slots)
        for symbol, index, dim in self.symbol_sources:
            bindings.symbols.setdefault(symbol, args[index] if dim < 0 else args[index].shape[dim])
        for step in self.steps[: self.region_start]:
            if step.kind == "split":
                self.fill_num_rows(bindings)
            args, kwargs = bindings.arguments(step)
            bindings.store(step, step.call(*args, **kwargs))
        return bindings

    def finish(self, bindings: Bindings, segments: Iterable[KnownSegments] = ()) -> list[Any]:
        """Runs the region and returns the graph's outputs; values that no later step reads are dropped from
        `bindings`. Attention over `segments`, whose lengths the host knows, gets their bound and not the
        traced one, often the token count, for which FlashAttention 2 launches blocks.
        """
        self.fill_num_rows(bindings)
        self.derived.compare()
        known = {each.cu_seqlens.data_ptr(): each for each in segments}
        branches = StepBranches(self.device)
        for step in self.region:
            args, kwargs = bindings.arguments(step)
            own = known.get(args[3].data_ptr()) if known and step.call is varlen_attention else None
            if own is None:
                result = branches.run(step, *args, **kwargs)
            else:
                query, key, value, _, _, scale = args
                result = own.attend(query, key, value, scale)
            bindings.store(step, result)
        branches.join()
        return self.results(bindings)

    def results(self, bindings: Bindings) -> list[Any]:
        """Returns the graph's outputs, after all steps."""
        return [bindings.value(output) for output in self.outputs]

    def fill_num_rows(self, bindings: Bindings) -> None:
        """Fills in the number of rows for the masks of pad rows, unless a capture has set its own."""
        slot = self.num_rows_slot
        if slot is None or bindings.slots[slot] is not None:
            return
        # A fill is enqueued; a copy from the host would wait for the device.
        tokens = self.tokens(bindings)
        rows = torch.iinfo(torch.int64).max if tokens is None else tokens
        bindings.slots[slot] = torch.full((), rows, dtype=torch.int64, device=self.device)

    def run(self, args: Sequence[Any], segments: Iterable[KnownSegments] = ()) -> list[Any]:
        """Runs the whole program at the shape of its inputs; `segments` as for `finish`."""
        bindings = self.begin(args)
        self.move_to_device(bindings)
        return self.finish(bindings, segments)

    def move_to_device(self, bindings: Bindings) -> None:
        """Moves the results of host ops to the region's device."""
        for step in self.host_steps:
            for slot in step.outputs:
                if slot >= 0 and isinstance(bindings.slots[slot], torch.Tensor):
                    bindings.slots[slot] = to_device(bindings.slots[slot], self.device)

    def tokens(self, bindings: Bindings) -> int | None:
        """Returns the number of tokens (rows) of this run."""
        return None if self.token_symbol is None else bindings.symbols[self.token_symbol]

    @property
    def region(self) -> tuple[Step, ...]:
        """The steps after the last host op."""
        return self.steps[self.region_start :]

    @property
    def pieces(self) -> list[Step]:
        """The steps that are compiled pieces."""
        return [step for step in self.steps if step.kind == "piece"]

    @property
    def splits(self) -> list[Step]:
        """The steps that are splitting ops."""
        return [step for step in self.steps if step.kind == "split"]

    @property
    def num_distinct(self) -> int:
        """Compilations that serve all pieces."""
        return len({step.distinct for step in self.pieces})

    @property
    def host_steps(self) -> list[Step]:
        """The steps that are host ops."""
        return [step for step in self.steps if step.kind == "host"]


@dataclass(frozen=True)
class NamedRegion:
    """A program's region with names for its inputs."""

    program: Program
    names: Mapping[int, str]
    """Of the region's inputs, by slot."""

    @cached_property
    def inputs(self) -> dict[str, RegionInput]:
        """The region's inputs by name."""
        entries = self.program.region_inputs
        return {self.names[entry.slot]: entry for entry in entries if entry.slot in self.names}

    @cached_property
    def segment_inputs(self) -> tuple[str, ...]:
        """The inputs that are cumulative lengths of attention."""
        return tuple(name for name, entry in self.inputs.items() if entry.is_segments)

    @cached_property
    def frame_lengths(self) -> str | None:
        """Name of the cumulative lengths of images or frames; None if no input of the region has them."""
        attentions = [step for step in self.program.splits if step.call is varlen_attention]
        slots = {step.args[3].slot for step in attentions}
        if len(slots) > 1:  # windows have a fixed bound, images the token count
            slots = {step.args[3].slot for step in attentions if not isinstance(step.args[4], int)}
        segments = {entry.slot for entry in self.program.region_inputs if entry.is_segments}
        return next(map(self.names.get, slots & segments), None) if len(slots) == 1 else None

    def bind(self, bindings: Bindings, tensors: Mapping[str, Tensor]) -> Bindings:
        """Returns a copy of bindings with these tensors as the region's inputs."""
        bound = bindings.copy()
        for entry in self.program.region_inputs:
            if entry.slot in self.names:
                bound.slots[entry.slot] = tensors[self.names[entry.slot]]
        return bound


@dataclass(frozen=True)
class BoundProgram:
    """A program each of whose inputs is a named tensor of the forward, a fixed tensor, or a number: the
    forward without Dynamo's guards, which cost 0.5-1 ms per call.
    """

    program: Program
    names: tuple[str | None, ...]
    fixed: tuple[Any, ...]
    sizes: Mapping[str, tuple[str, int]]
    """Where the value of a symbol is read: the name of an input, and a dimension."""

    def arguments(self, inputs: Mapping[str, Tensor]) -> list[Any]:
        """Returns the program's arguments for these inputs."""
        args = [
            fixed if name is None else inputs[name]
            for name, fixed in zip(self.names, self.fixed, strict=True)
        ]
        for symbol, position, dim in self.program.symbol_sources:
            if dim < 0:
                name, dim = self.sizes[symbol]
                args[position] = inputs[name].shape[dim]
        return args

    def __call__(self, inputs: Mapping[str, Tensor], segments: Iterable[KnownSegments] = ()) -> Tensor:
        """Runs the forward at the tensors' shapes; `segments` as for `Program.finish`."""
        result: Tensor = self.program.run(self.arguments(inputs), segments)[0]
        return result

    @cached_property
    def region(self) -> NamedRegion:
        """The region, with the names of the forward's inputs."""
        named = {slot: name for slot, name in enumerate(self.names) if name is not None}
        return NamedRegion(self.program, named)

    @cached_property
    def placements(self) -> dict[str, tuple[torch.device, torch.dtype]]:
        """Traced device and dtype of each input: a bound may stay on the host."""
        return {name: (entry.device, entry.dtype) for name, entry in self.region.inputs.items()}

    def symbols(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        """Returns the values of the trace's symbols for these inputs."""
        known = ((symbol, *place) for symbol, place in self.sizes.items() if place[0] in inputs)
        return {symbol: inputs[name].shape[dim] for symbol, name, dim in known}

    def tokens(self, inputs: Mapping[str, Tensor | Sequence[Tensor] | None]) -> int | None:
        """Returns the rows of these inputs, by the token symbol; None where no input has it. An input may be
        several tensors whose rows follow one another, or None.
        """
        name, dim = self.sizes.get(self.program.token_symbol or "", ("", 0))
        if (value := inputs.get(name)) is None:
            return None
        return sum(part.shape[dim] for part in ([value] if isinstance(value, torch.Tensor) else value))


def bind(program: Program, args: list[Any], outputs: list[Any], inputs: Mapping[str, Tensor]) -> BoundProgram:
    """Names a program's arguments, by identity in the one call that was observed: its `args`, `outputs` and
    `inputs`, each tensor at an address of its own. CompileError: the forward did not return one tensor, or a
    number is no size of an input.
    """
    by_address = {(t.data_ptr(), t.shape, t.dtype): name for name, t in inputs.items()}
    names: list[str | None] = []
    fixed: list[Any] = []
    for arg in args:
        is_tensor = isinstance(arg, torch.Tensor)
        name = by_address.get((arg.data_ptr(), arg.shape, arg.dtype)) if is_tensor else None
        names.append(name)
        fixed.append(arg if name is None and is_tensor else None)
    sizes: dict[str, tuple[str, int]] = {}
    for symbol, position, dim in program.symbol_sources:
        if dim < 0:
            sizes[symbol] = _source_of_number(program, symbol, names, args[position], inputs)
        elif (name := names[position]) is not None:
            sizes[symbol] = name, dim
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    if len(tensors) != 1:
        raise CompileError(f"the forward returned {len(tensors)} tensors; expected one")
    return BoundProgram(program, tuple(names), tuple(fixed), sizes)


def _source_of_number(
    program: Program, symbol: str, names: Sequence[str | None], value: int, inputs: Mapping[str, Tensor]
) -> tuple[str, int]:
    for position, name in enumerate(names):
        if name is None:
            continue
        shape = program.input_shapes[position]
        assert shape is not None
        for dim, size in enumerate(shape):
            if str(size) == symbol and inputs[name].shape[dim] == value:
                return name, dim
    raise CompileError(f"the graph takes the number {symbol} = {value}, which is no size of any input")

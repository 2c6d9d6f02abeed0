"""A `Program`: the ordered steps that one forward became, and how to run them.

Values live in numbered slots. A step reads slots and sizes and fills slots. The steps up to the last host op
are the *prologue* and always run at the true shape; the rest is the *region*, which may run padded. Its steps
are called here, at the shape of the values, or one by one by `capture`, which records them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.staging import to_device
from fxsplit_encoder.attention import KnownSegments, varlen_attention
from fxsplit_encoder.compile.branches import StepBranches
from fxsplit_encoder.compile.derived import DerivedParameters
from fxsplit_encoder.compile.padding import PaddingReport
from fxsplit_encoder.compile.sizes import Size, SymbolValues, holds_for_capture


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the value of a slot."""

    slot: int


Argument = Any
"""A `Ref`, a `Size`, a constant, or a list or tuple of these."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call: a compiled piece, a splitting op or a host op."""

    kind: str
    """"piece", "split" or "host"."""
    name: str
    call: Callable[..., Any]
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    outputs: tuple[int, ...]
    """The slots that the call's results fill; one for a tensor, several for a sequence (-1: a result that
    is not read).
    """
    returns_tensor: bool
    frees: tuple[int, ...] = ()
    """Slots that no later step reads."""
    distinct: int = -1
    """For a piece: which distinct compilation it calls."""
    nodes: tuple[str, ...] = ()
    """The names of the graph's nodes that it stands for."""
    beside: bool = False
    """Whether it may run beside the steps after it (`compile.branches`)."""
    joins: bool = False
    """Whether it reads what a step before it computes beside."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the trace knows of a tensor in a slot."""

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class RegionInput:
    """A tensor that enters the region and changes from call to call."""

    slot: int
    info: TensorInfo
    is_segments: bool
    """Whether it is the cumulative lengths of a varlen attention."""
    token_dim: int | None
    """The dimension that counts tokens, if any."""
    is_permutation: bool = False
    """Whether it is a permutation of rows, see `compile.permute`."""


@dataclass(slots=True)
class Bindings:
    """The values of one run: slots and symbols."""

    slots: list[Any]
    symbols: SymbolValues = field(default_factory=dict)

    def copy(self) -> Bindings:
        """The same values, for a run that leaves these as they are."""
        return Bindings(list(self.slots), dict(self.symbols))

    def value(self, argument: Argument) -> Any:
        """What an argument is in this run."""
        if isinstance(argument, Ref):
            return self.slots[argument.slot]
        if isinstance(argument, Size):
            return argument(self.symbols)
        if isinstance(argument, list | tuple):
            return type(argument)(self.value(each) for each in argument)
        return argument

    def arguments(self, step: Step) -> tuple[list[Any], dict[str, Any]]:
        """What a step is called with, positional and by name."""
        value = self.value
        return [value(each) for each in step.args], {key: value(each) for key, each in step.kwargs.items()}

    def store(self, step: Step, result: Any) -> None:
        """Keeps what a step returned, and lets go of what no later step reads."""
        slots = self.slots
        for slot, value in zip(step.outputs, (result,) if step.returns_tensor else result, strict=False):
            if slot >= 0:
                slots[slot] = value
        for slot in step.frees:
            slots[slot] = None


@dataclass(frozen=True, slots=True)
class Program:
    """A traced forward, split, compiled and ready to run at any size. Slots 0..num_inputs-1 are the graph's
    inputs.
    """

    steps: tuple[Step, ...]
    num_inputs: int
    num_slots: int
    num_rows_slot: int | None
    """Where the masks of pad rows find the number of real rows, a 0-dimensional int64 tensor."""
    constants: Mapping[int, Tensor]
    """Tensors lifted out of the graph, by slot."""
    static_inputs: frozenset[int]
    """Inputs that are parameters or buffers: bound by address when captured."""
    symbol_sources: tuple[tuple[str, int, int], ...]
    """(symbol, input, dimension) for each symbol a size may use; dimension -1: the input is the number
    itself.
    """
    outputs: tuple[Argument, ...]
    output_infos: tuple[TensorInfo | None, ...]
    input_shapes: tuple[tuple[Size, ...] | None, ...]
    """The traced shape of every input; None for numbers."""
    token_symbol: str | None
    """The symbol of the token dimension; None when the graph is static or has no splitting op."""
    region_start: int
    region_inputs: tuple[RegionInput, ...]
    region_symbols: tuple[str, ...]
    """The symbols, other than the token symbol, that sizes inside the region use."""
    device: torch.device
    padding: PaddingReport
    accepts: Callable[[SymbolValues], bool]
    """Whether the assumptions made while tracing and compiling hold for these symbol values."""
    derived: DerivedParameters = field(default_factory=DerivedParameters)
    """Parameters that passes keep in another form."""
    tokens_unknown: str = ""
    """Why there is no token symbol."""
    collectives: tuple[str, ...] = ()
    """The ops that other ranks have to call as well."""
    pass_report: Mapping[str, int] = field(default_factory=dict)
    """At how many places each pass that ran changed the graph, see `compile.passes.pass_rows`."""

    def may_be_captured(self, symbols: SymbolValues) -> bool:
        """Whether the graph means the same at these sizes as where it was traced."""
        if self.token_symbol is None:
            return self.accepts(symbols)
        return holds_for_capture(self.accepts, self.token_symbol, self.padding.divisor, symbols)

    @property
    def fixed_slots(self) -> list[int]:
        """The slots that hold the same from run to run: parameters, constants, derived parameters."""
        return [*self.static_inputs, *self.constants, *(recipe.slot for recipe in self.derived.recipes)]

    def begin(self, args: Sequence[Any], derived_stamp: object = None) -> Bindings:
        """Binds the graph's inputs and runs the prologue at the true shape. What host ops made may still be
        on the CPU.

        Args:
            derived_stamp: that of the derived parameters, where parameters are the same tensors, and lie
                where they did, as when they had it.
        """
        bindings = Bindings([*args, *([None] * (self.num_slots - len(args)))])
        for slot, constant in self.constants.items():
            bindings.slots[slot] = constant
        self.derived.fill(bindings.slots, derived_stamp)
        for symbol, index, dim in self.symbol_sources:
            bindings.symbols.setdefault(symbol, args[index] if dim < 0 else args[index].shape[dim])
        prologue = self.steps[: self.region_start]
        if any(step.kind == "split" for step in prologue):
            self.fill_num_rows(bindings)
        for step in prologue:
            args, kwargs = bindings.arguments(step)
            bindings.store(step, step.call(*args, **kwargs))
        return bindings

    def finish(self, bindings: Bindings, segments: Iterable[KnownSegments] = ()) -> list[Any]:
        """Runs the region and returns the graph's outputs.

        Args:
            bindings: what `begin` returned; values that no later step reads are dropped from it.
            segments: those whose lengths the host knows. Attention takes them in place of the bound that was
                traced, which is often the token count: right for every batch, but FlashAttention 2 launches
                blocks for it.
        """
        self.fill_num_rows(bindings)
        self.derived.compare()
        known = {each.cu_seqlens.data_ptr(): each for each in segments}
        branches = StepBranches(self.device)
        for step in self.region:
            args, kwargs = bindings.arguments(step)
            own = known.get(args[3].data_ptr()) if known and step.call is varlen_attention else None
            if own is None:
                result = branches.placed(step)(*args, **kwargs)
            else:
                query, key, value, _, _, scale = args
                result = own.attend(query, key, value, scale)
            bindings.store(step, result)
        branches.join()
        return self.results(bindings)

    def results(self, bindings: Bindings) -> list[Any]:
        """The graph's outputs, after all steps."""
        return [bindings.value(output) for output in self.outputs]

    def fill_num_rows(self, bindings: Bindings) -> None:
        """Puts the number of rows of this run where the masks of pad rows read it, unless it is there: a
        capture brings its own.
        """
        slot = self.num_rows_slot
        if slot is None or self.token_symbol is None or bindings.slots[slot] is not None:
            return
        # A fill is enqueued; a copy from the host would wait for the device.
        rows = bindings.symbols[self.token_symbol]
        bindings.slots[slot] = torch.full((), rows, dtype=torch.int64, device=self.device)

    def run(self, args: Sequence[Any], segments: Iterable[KnownSegments] = ()) -> list[Any]:
        """The whole program at the shape of its inputs; `segments` as for `finish`."""
        bindings = self.begin(args)
        self.move_to_device(bindings)
        return self.finish(bindings, segments)

    def move_to_device(self, bindings: Bindings) -> None:
        """Brings what host ops made to the region's device."""
        for step in self.steps[: self.region_start]:
            if step.kind == "host":
                for slot in step.outputs:
                    if slot >= 0 and isinstance(bindings.slots[slot], torch.Tensor):
                        bindings.slots[slot] = to_device(bindings.slots[slot], self.device)

    def tokens(self, bindings: Bindings) -> int | None:
        """The number of tokens (rows) of this run."""
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
    def frame_lengths_slot(self) -> int | None:
        """The slot of the cumulative lengths; of several, the only one whose segments just the token count
        bounds, since windows have a fixed bound. None if there is none, or the region makes it.
        """
        attentions = [step for step in self.splits if step.call is varlen_attention]
        slots = {step.args[3].slot for step in attentions}
        if len(slots) > 1:
            slots = {step.args[3].slot for step in attentions if not isinstance(step.args[4], int)}
        slots &= (
            {entry.slot for entry in self.region_inputs if entry.is_segments} if len(slots) == 1 else set()
        )
        return next(iter(slots), None)

    @property
    def num_distinct(self) -> int:
        """Compilations that serve all pieces."""
        return len({step.distinct for step in self.pieces})

    @property
    def host_steps(self) -> list[Step]:
        """The steps that are host ops."""
        return [step for step in self.steps if step.kind == "host"]

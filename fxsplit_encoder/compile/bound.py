"""Programs whose inputs are known by name, and how the names are found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.attention import KnownSegments
from fxsplit_encoder.compile.program import Bindings, Program, RegionInput
from fxsplit_encoder.errors import CompileError


@dataclass(frozen=True)
class NamedRegion:
    """A program's region, the inputs of which have names."""

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
        """The cumulative lengths of images or frames, see `Program.frame_lengths_slot`."""
        slot = self.program.frame_lengths_slot
        return self.names.get(slot) if slot is not None else None

    def bind(self, bindings: Bindings, tensors: Mapping[str, Tensor]) -> Bindings:
        """A copy of some bindings with these tensors as the region's inputs."""
        bound = bindings.copy()
        for entry in self.program.region_inputs:
            if entry.slot in self.names:
                bound.slots[entry.slot] = tensors[self.names[entry.slot]]
        return bound


@dataclass(frozen=True)
class BoundProgram:
    """A program whose inputs are known: each is a named tensor of the forward, a fixed tensor, or a number.

    It stands for `forward(inputs: dict) -> Tensor` and is called past Dynamo's guards, which cost 0.5-1 ms
    per call.
    """

    program: Program
    names: tuple[str | None, ...]
    fixed: tuple[Any, ...]
    numbers: tuple[tuple[int, str, int], ...]
    """(position, input name, dimension) of the inputs that are sizes."""

    def arguments(self, inputs: Mapping[str, Tensor]) -> list[Any]:
        """The program's arguments for these inputs."""
        args = [
            fixed if name is None else inputs[name]
            for name, fixed in zip(self.names, self.fixed, strict=True)
        ]
        for position, name, dim in self.numbers:
            args[position] = inputs[name].shape[dim]
        return args

    def __call__(self, inputs: Mapping[str, Tensor], segments: Iterable[KnownSegments] = ()) -> Tensor:
        """The forward on these tensors, at their shapes; `segments` as for `Program.finish`."""
        outputs = self.program.run(self.arguments(inputs), segments)
        result = outputs[0]
        assert isinstance(result, torch.Tensor)
        return result

    @cached_property
    def region(self) -> NamedRegion:
        """The region, with the names of the forward's inputs."""
        named = {slot: name for slot, name in enumerate(self.names) if name is not None}
        return NamedRegion(self.program, named)

    @cached_property
    def placements(self) -> dict[str, tuple[torch.device, torch.dtype]]:
        """Per input, the device and the dtype that it was traced with: a bound may stay on the host."""
        return {name: (entry.info.device, entry.info.dtype) for name, entry in self.region.inputs.items()}

    def symbols(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        """The values that the trace's symbols take for these inputs."""
        values: dict[str, int] = {}
        for symbol, name, dim in self._sources:
            if name in inputs:
                values.setdefault(symbol, inputs[name].shape[dim])
        return values

    def tokens(self, inputs: Mapping[str, Tensor | Sequence[Tensor] | None]) -> int | None:
        """Rows of these inputs, as the token symbol counts them; None where no input tells.

        An input may be several tensors whose rows follow one another; None is none.
        """
        for symbol, name, dim in self._sources:
            if symbol == self.program.token_symbol and (value := inputs.get(name)) is not None:
                if isinstance(value, torch.Tensor):
                    return value.shape[dim]
                return sum(part.shape[dim] for part in value)
        return None

    @cached_property
    def _sources(self) -> tuple[tuple[str, str, int], ...]:
        """(symbol, input name, dimension): where a symbol's value is read."""
        numbers = {position: (name, dim) for position, name, dim in self.numbers}
        found = (
            (symbol, *numbers.get(position, (self.names[position], dim)))
            for symbol, position, dim in self.program.symbol_sources
        )
        return tuple((symbol, name, dim) for symbol, name, dim in found if name is not None)


def bind(program: Program, args: list[Any], outputs: list[Any], inputs: Mapping[str, Tensor]) -> BoundProgram:
    """Finds out which argument is which input, by identity in the one call that was observed.

    Args:
        program: what was called.
        args: its arguments in that call.
        outputs: what it returned.
        inputs: the forward's inputs by name, each tensor at an address of its own.

    Raises:
        CompileError: the forward did not return one tensor, or a number is no size of an input.
    """
    by_address = {(t.data_ptr(), t.shape, t.dtype): name for name, t in inputs.items()}
    names: list[str | None] = []
    fixed: list[Any] = []
    for arg in args:
        key = (arg.data_ptr(), arg.shape, arg.dtype) if isinstance(arg, torch.Tensor) else None
        name = by_address.get(key) if key is not None else None
        names.append(name)
        fixed.append(arg if name is None and isinstance(arg, torch.Tensor) else None)
    numbers = []
    for symbol, position, dim in program.symbol_sources:
        if dim < 0:
            numbers.append((position, *_source_of_number(program, symbol, names, args[position], inputs)))
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    if len(tensors) != 1:
        raise CompileError(f"the forward returned {len(tensors)} tensors; expected one")
    return BoundProgram(program, tuple(names), tuple(fixed), tuple(numbers))


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

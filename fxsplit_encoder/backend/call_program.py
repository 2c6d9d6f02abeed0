"""The program of a traced graph with its captures: its budgets, its calls of any size, and its parameters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.tensors import lie_at
from fxsplit_encoder.capture.buffers import SharedBuffers, StaticBuffer, gibibytes, memory_of
from fxsplit_encoder.capture.forward import CaptureRequest, ProgramBody
from fxsplit_encoder.capture.inputs import StaticInputs, example_values, full_cu_seqlens, segment_capacity
from fxsplit_encoder.capture.parameters import MemoryOrders
from fxsplit_encoder.compile.blocks import LiveWeights
from fxsplit_encoder.compile.options import HostOp
from fxsplit_encoder.compile.program import Bindings, NamedRegion, Program, RegionInput
from fxsplit_encoder.compile.sizes import SymbolValues
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import CaptureError, CaptureMemoryError, ConfigError, WeightsMovedError
from fxsplit_encoder.kernels.attention import KnownSegments
from fxsplit_encoder.planning.limits import CaptureKey, generate_budgets, inferred_budgets
from fxsplit_encoder.planning.plan import CaptureSize, PathPlan
from fxsplit_encoder.protocol import BudgetDeclaration
from fxsplit_encoder.runtime.captured_program import CapturedProgram, Served
from fxsplit_encoder.runtime.requests import CaptureScope, check_replacements, layouts_of, request_of_program

PATH = "default"
"""The only path of a graph, in plans and statistics."""

# Without an adapter nothing says how large batches get: powers of two over any size. Captures are lazy, so a
# long ladder costs nothing until it is used.
_LADDER_OF_UNKNOWN_RANGE = tuple(generate_budgets(1, 16384))


def sizes_of(program: Program, bindings: Bindings) -> tuple[int, ...]:
    """Returns the sizes of a call other than the token count."""
    return tuple(map(bindings.symbols.__getitem__, program.region_symbols))


@dataclass(frozen=True, slots=True)
class ProgramBudgets:
    """The budgets that a configuration and the host ops of a program give."""

    tokens: tuple[int, ...]
    """The budgets, in output tokens."""
    rows_per_token: int | Fraction
    """Rows of the token dimension that one token of a budget stands for."""
    segment_factors: Mapping[int, int]
    """By slot: segments that cumulative lengths have for each image or frame, where the host ops say so."""
    max_items: int
    """Images or frames of a batch; 0: as many as there are tokens."""

    @classmethod
    def of(cls, program: Program, config: EncoderConfig, bindings: Bindings) -> ProgramBudgets:
        """Asks a program's host ops; ConfigError where the smallest budget has no capacity for an image."""
        rows_per_token: int | Fraction = 1
        inferred = _LADDER_OF_UNKNOWN_RANGE
        segment_factors: dict[int, int] = {}
        for step in program.host_steps:
            assert isinstance(step.call, HostOp)
            declared = step.call.budgets
            assert isinstance(declared, BudgetDeclaration)
            args, _ = bindings.arguments(step)
            rows_per_token = declared.rows_per_output_token(*args)
            low, high = declared.budget_range(*args)
            # Where a row gives several output tokens, budgets hold whole rows.
            tile = 1 if rows_per_token >= 1 else math.ceil(1 / rows_per_token)
            inferred = inferred_budgets(low, high, tile, config.max_items_per_batch)
            if declared.segment_factors is not None:
                segment_factors |= zip(step.outputs, declared.segment_factors(*args), strict=True)
        tokens = tuple(config.token_budgets) or inferred
        if tokens[0] * rows_per_token < 1:
            raise ConfigError(
                f"token_budgets: {tokens[0]} has no capacity for an image; allowed: at least "
                f"{math.ceil(1 / rows_per_token)} output tokens"
            )
        return cls(tokens, rows_per_token, segment_factors, config.max_items_per_batch)

    def rows(self, tokens: int) -> int:
        """Returns the rows of so many output tokens."""
        return int(tokens * self.rows_per_token)

    def tokens_of(self, rows: int) -> int:
        """Output tokens that so many rows give."""
        return math.ceil(rows / self.rows_per_token)

    def segment_factor(self, slot: int) -> int:
        """Segments that the cumulative lengths in a slot have for each image or frame."""
        return self.segment_factors.get(slot, 1)

    def segments_held(self, slot: int, tokens: int) -> int:
        """Images or frames of captured cumulative lengths. Only their number is configured."""
        most = self.max_items if self.segment_factor(slot) == 1 else 0
        return segment_capacity(tokens, most or tokens)


class CallProgram(CapturedProgram):
    """A program whose sizes are known only from its calls, with captures of it; a batch is the bindings of a
    call.
    """

    sizes: tuple[int, ...] = ()
    """The sizes of its calls other than the token count, if they are all equal."""

    def __init__(
        self,
        region: NamedRegion,
        parameters: CallParameters,
        budgets: Sequence[int],
        mode: str,
        scope: CaptureScope,
    ) -> None:
        super().__init__("torch.compile", budgets, mode, scope)
        self._region = region
        self._parameters = parameters

    @property
    def region(self) -> NamedRegion:
        """The region of the program."""
        return self._region

    def key(self, budget: int) -> CaptureKey:
        """Returns the key of the default path, with the other sizes as axis keys."""
        return CaptureKey(PATH, budget, self.sizes)

    def _fixed(self, symbols: SymbolValues) -> Bindings:
        """Binds what is the same in every run: checked parameters, constants, derived parameters."""
        self._parameters.check_addresses()
        program = self._region.program
        slots = self._parameters.aliases + [None] * (program.num_slots - program.num_inputs)
        for slot, tensor in (*program.constants.items(), *program.derived.values.items()):
            slots[slot] = tensor
        return Bindings(slots, dict(symbols))

    def values(self, batch: Bindings) -> dict[str, Any]:
        """Returns the region's inputs in the slots."""
        return {name: batch.slots[entry.slot] for name, entry in self._region.inputs.items()}

    def run_unpadded(self, batch: Bindings, values: Mapping[str, Any]) -> tuple[list[Any], bool]:
        """Runs the program; the bindings are used up."""
        self._parameters.check_addresses()
        return run_exact(self._region.program, batch), True

    def run_eager(self, batch: Bindings) -> list[Any]:
        """Runs the program: behind `torch.compile` there is no other code."""
        return self.run_unpadded(batch, {})[0]

    def copy_of(self, batch: Bindings) -> Bindings:
        """Copies the bindings."""
        return batch.copy()


class PaddedProgram(CallProgram):
    """A program with its captures for calls that differ in the token count alone; `bindings` are of one."""

    def __init__(
        self,
        region: NamedRegion,
        parameters: CallParameters,
        budgets: ProgramBudgets,
        bindings: Bindings,
        mode: str,
        scope: CaptureScope,
    ) -> None:
        super().__init__(region, parameters, budgets.tokens, mode, scope)
        self._program_budgets = budgets
        self._symbols = dict(bindings.symbols)
        self.sizes = sizes_of(region.program, bindings)
        self.declares_padding = region.program.padding.allowed

    def request(self, tokens: int, shared: SharedBuffers) -> CaptureRequest:
        """Makes a capture request of so many output tokens over `shared` inputs; CaptureError where the trace
        does not hold for so many, or, before any is made, memory does not hold them.
        """
        region, rows = self._region, self._program_budgets.rows(tokens)
        assert region.program.token_symbol is not None
        bindings = self._fixed({**self._symbols, region.program.token_symbol: rows})
        self._check_memory(bindings.symbols, tokens)
        values = {
            name: self._example_input(name, entry, bindings.symbols, tokens, rows)
            for name, entry in region.inputs.items()
        }
        return request_of_program(region, tokens, values, bindings, self._parameters, shared)

    def _check_memory(self, symbols: Mapping[str, int], tokens: int) -> None:
        device = self._region.program.device
        entries = (entry for entry in self._region.inputs.values() if not entry.is_segments)
        needed = sum(math.prod(n(symbols) for n in each.shape) * each.dtype.itemsize for each in entries)
        if needed > (memory := memory_of(device)):
            raise CaptureMemoryError(
                f"token_budgets: {tokens} output tokens take {gibibytes(needed)} of static inputs, and "
                f"{device} has {gibibytes(memory)}; list smaller budgets"
            )

    def _example_input(
        self, name: str, entry: RegionInput, symbols: Mapping[str, int], tokens: int, rows: int
    ) -> Tensor:
        program = self._region.program
        device, dtype = program.device, entry.dtype
        if entry.is_segments and not program.padding.segments_may_grow:
            return full_cu_seqlens(entry.shape[0](symbols) - 1, rows, 1).to(device, dtype)
        if entry.is_segments:
            factor = self._program_budgets.segment_factor(entry.slot)
            capacity = factor * self._program_budgets.segments_held(entry.slot, tokens)
            segments = 1 if factor == 1 else capacity
            return full_cu_seqlens(capacity, rows, segments).to(device, dtype)
        shape = [size(symbols) for size in entry.shape]
        # Zeros would make the times that `auto` compares too short.
        make = example_values if dtype.is_floating_point else torch.zeros
        strides = [size(symbols) for size in entry.strides]
        return _stored_as(name, make(shape, device=device, dtype=dtype), strides)

    def rows(self, batch: Bindings, values: Mapping[str, Any]) -> int | None:
        """Returns the size of the token dimension."""
        return self._region.program.tokens(batch)

    def fits(self, size: int, rows: int | None) -> bool:
        """Returns whether the rows are a whole number of output tokens."""
        return self._program_budgets.rows(size) == rows


class SizedProgram(CallProgram):
    """A program with its captures by all sizes of a call, of which each is kept as long as it recurs, over
    copies of the call's inputs.
    """

    declares_padding = True  # there is nothing to pad
    recurring_counts = "hits"

    def __init__(
        self, region: NamedRegion, parameters: CallParameters, mode: str, scope: CaptureScope
    ) -> None:
        super().__init__(region, parameters, (), mode, scope)
        if mode in ("full", "piecewise"):
            self.unpadded.mode = mode
        self._call: Bindings | None = None
        """The bindings of the call in hand, with its inputs and the parameters."""

    def run(self, planned: PathPlan, batch: Bindings, **options: Any) -> Served:
        """As any program, with the inputs of the batch for a capture that is due."""
        self._call = batch
        try:
            return super().run(planned, batch, **options)
        finally:
            self._call = None

    def request(self, size: CaptureSize, shared: SharedBuffers) -> CaptureRequest:
        """Makes the capture request of the current call over `shared` inputs; CaptureError where no copy can
        have the layout of an input.
        """
        program, call = self._region.program, self._call
        assert call is not None
        bindings = self._fixed(call.symbols)
        inputs = StaticInputs(
            shared.share(StaticBuffer(name, _stored_as(name, v.to(program.device), v.stride()), None))
            for name, v in self.values(call).items()
        )
        body = ProgramBody(program, self._region.bind(bindings, inputs.tensors))
        # Nothing is padded, so cumulative lengths are inputs like others.
        return CaptureRequest(inputs, body, self._parameters, rows=None)


def run_exact(program: Program, bindings: Bindings) -> list[Any]:
    """Runs at the exact shape, which uses the bindings up."""
    slots = [entry.slot for entry in program.region_inputs if entry.is_segments]
    lengths = {s: bindings.slots[s].tolist() for s in slots if bindings.slots[s].device.type == "cpu"}
    program.move_to_device(bindings)  # with which a host op has just computed the segments
    return program.finish(bindings, [KnownSegments(bindings.slots[s], each) for s, each in lengths.items()])


def _stored_as(name: str, value: Tensor, strides: Sequence[int]) -> Tensor:
    """Returns a copy of an input in these strides, for which pieces are compiled; CaptureError: no copy has
    them.
    """
    if any(stride == 0 and size > 1 for size, stride in zip(value.shape, strides, strict=True)):
        raise CaptureError(
            f"{name} is expanded: strides {tuple(strides)} for {tuple(value.shape)}; pass it contiguous"
        )
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


_WHAT_TO_DO = "Compile the module again after torch._dynamo.reset()"


class CallParameters:
    """Parameters of a program: those among the arguments of a call, and the `weights` of blocks.

    A replay checks them after its launch, while the device works: its capture holds the memory that it reads.
    Captures and runs at the exact shape check them first. The parameters themselves are not held.
    """

    def __init__(self, program: Program, weights: LiveWeights) -> None:
        self._live = weights
        self._num_inputs = program.num_inputs
        num_given = program.num_inputs - len(weights)
        given = sorted(index for index in program.static_inputs if index < num_given)
        self._slots = [*given, *range(num_given, program.num_inputs)]
        self._given_of = _picker(given)
        self._layouts: list[tuple[Any, ...] | None] | None = None
        self._unchecked: Sequence[Any] | None = None
        """Those among the arguments of the call, until they are checked."""
        self._have_moved = False
        self._weights: Sequence[Tensor] = ()
        self._references: list[weakref.ref[Any]] = []
        self._addresses: list[int] = []
        self._orders = MemoryOrders(())
        self._permutable_of = _picker(())

    def begin(self, args: Sequence[Any]) -> Sequence[Tensor]:
        """Takes the arguments of a call; returns the weights of blocks as the last check found them."""
        self._unchecked = given = self._given_of(args)
        self._have_moved = False
        if self._layouts is None:
            self._take(given, self._live.current())
        return self._weights

    def check_addresses(self) -> None:
        """Raises WeightsMovedError unless all lie where those of the last checked call did (capture rule 6);
        looks once a call. WeightsLayoutError: one has another layout than it was compiled for. InputError: a
        block has changed.
        """
        if (given := self._unchecked) is not None:
            weights = self._live.current()
            if not self._are_where_they_were(given, weights):
                self._take(given, weights)
            self._unchecked = None  # one that raised is made again
        if self._have_moved:
            raise WeightsMovedError("capture rule 6: parameters were replaced since the capture")

    @property
    def aliases(self) -> list[Tensor | None]:
        """Other tensors over the memory of those that were checked last, by input of the program."""
        found: list[Tensor | None] = [None] * self._num_inputs
        for slot, reference in zip(self._slots, self._references, strict=True):
            parameter = reference()
            assert parameter is not None, "a call holds its parameters"
            found[slot] = parameter.detach()
        return found

    def memory(self) -> Sequence[Tensor]:
        """Returns aliases that keep their memory from being freed."""
        return [alias for alias in self.aliases if alias is not None]

    def let_go(self) -> None:
        """Keeps none of the last call alive."""
        self._unchecked = None

    def _are_where_they_were(self, given: Sequence[Any], weights: Sequence[Tensor]) -> bool:
        # An address alone does not tell: a matrix and its transpose may have the same one.
        if weights is not self._weights:
            return False
        try:
            # Each has to be asked: `parameter.data = ...` changes its address and neither its identity nor
            # its version.
            values = [*given, *weights]
            return lie_at(values, self._addresses) and self._orders.are_those_of(self._permutable_of(values))
        except TypeError:  # one was removed
            return False

    def _take(self, given: Sequence[Any], weights: Sequence[Tensor]) -> None:
        values = [*given, *weights]
        if self._layouts is None:
            self._layouts = layouts_of(values)
        check_replacements(self._layouts, values, _WHAT_TO_DO)
        addresses = list(map(torch.Tensor.data_ptr, values))
        self._have_moved = bool(self._references) and addresses != self._addresses
        self._weights, self._addresses = weights, addresses
        self._references = list(map(weakref.ref, values))
        self._orders = MemoryOrders(values)
        self._permutable_of = _picker(self._orders.indices)


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns a getter of the items at these indices, without Python for each of them."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda items: [items[index] for index in indices]

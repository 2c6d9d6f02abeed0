"""The capture request of a forward at one size: of a program, or of a tower's own code."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from fxsplit_encoder.capture.buffers import SharedBuffers, StaticBuffer
from fxsplit_encoder.capture.forward import CaptureRequest, ProgramBody, RowCount
from fxsplit_encoder.capture.inputs import StaticInputs, is_cumulative
from fxsplit_encoder.capture.parameters import CheckedParameters
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import CaptureError, WeightsLayoutError

if TYPE_CHECKING:
    from fxsplit_encoder.compile.program import Bindings, NamedRegion

PaddingLogics: TypeAlias = Mapping[str, Callable[[Tensor, Tensor], None]]
"""By name, how a tower fills an input of a capture (first) from a value (second) itself."""


@dataclass(frozen=True, slots=True)
class FreshInputs:
    """Inputs of one size, newly made: a capture takes them over."""

    tokens: int
    """The size in output tokens."""
    values: dict[str, Tensor]
    rows: int | None = None
    """Rows of the attended sequence; None: not known."""
    bindings: Bindings | None = None
    """Of a program, with everything but the region's inputs in its slots."""


def request_of_program(
    region: NamedRegion,
    fresh: FreshInputs,
    parameters: CheckedParameters,
    shared: SharedBuffers,
    padding_logics: PaddingLogics | None = None,
) -> CaptureRequest:
    """Makes the request of a program, and with it the one for a single segment; CaptureError where the trace
    does not hold for inputs of these sizes. A replay has to compare `parameters`.
    """
    program, bindings = region.program, fresh.bindings
    assert bindings is not None
    if not program.may_be_captured(bindings.symbols):
        raise CaptureError(
            f"the trace does not hold for {fresh.tokens} tokens: the code was traced for other sizes"
        )
    logics = padding_logics or {}
    buffers = {
        name: _buffer(region, name, tensor, logics.get(name), shared) for name, tensor in fresh.values.items()
    }
    num_rows = RowCount(fresh.rows, program.device) if fresh.rows is not None else None
    if program.num_rows_slot is not None and num_rows is not None:
        bindings.slots[program.num_rows_slot] = num_rows.tensor
    rows = fresh.tokens if fresh.rows is None else fresh.rows

    def request_over(own: Mapping[str, StaticBuffer]) -> CaptureRequest:
        inputs = StaticInputs(own.values())
        body = ProgramBody(program, region.bind(bindings, inputs.tensors))
        return CaptureRequest(inputs, body, parameters, rows, region.segment_inputs, num_rows)

    frames = region.frame_lengths
    request = request_over(buffers)
    may_grow = program.padding.segments_may_grow
    if frames is None or not may_grow or buffers[frames].tensor.shape[0] <= 2:
        return request

    def single_segment() -> CaptureRequest:
        device = buffers[frames].tensor.device
        lengths = torch.tensor([0, rows], dtype=torch.int32, device=device)
        return request_over({**buffers, frames: StaticBuffer(frames, lengths, None)})

    return replace(request, single_segment=single_segment)


def request_of_module(
    forward: Callable[[Mapping[str, Tensor]], Any],
    fresh: FreshInputs,
    parameters: CheckedParameters,
    shared: SharedBuffers,
    *,
    growing: Collection[str],
    splitting_ops: tuple[str, ...],
    padding_logics: PaddingLogics,
) -> CaptureRequest:
    """Makes the request of a forward that is captured as it is; `growing` names the inputs of every batch."""
    own = (
        StaticBuffer(name, tensor, 0, padding_logics.get(name), may_be_left_out=name not in growing)
        for name, tensor in fresh.values.items()
    )
    inputs = StaticInputs(shared.share(buffer) if buffer.name in growing else buffer for buffer in own)
    tensors = inputs.tensors
    unpadded = fresh.values.keys() - padding_logics.keys()
    return CaptureRequest(
        inputs,
        lambda: (forward(tensors),),
        parameters,
        fresh.tokens,
        lengths=[name for name in fresh.values if name in unpadded and is_cumulative(fresh.values[name])],
        splitting_ops=splitting_ops,
    )


def _buffer(
    region: NamedRegion,
    name: str,
    tensor: Tensor,
    padding_logic: Callable[[Tensor, Tensor], None] | None,
    shared: SharedBuffers,
) -> StaticBuffer:
    entry = region.inputs.get(name)
    if entry is not None and entry.is_segments:  # replaced as a whole
        return shared.share(StaticBuffer(name, tensor, None))
    dim = entry.token_dim if entry is not None else None
    is_permutation = entry is not None and entry.is_permutation
    buffer = StaticBuffer(
        name,
        tensor,
        0 if dim is None else dim,
        padding_logic,
        is_permutation=is_permutation,
        may_be_left_out=dim is None,
    )
    return buffer if dim is None else shared.share(buffer)


def layouts_of(values: Iterable[object]) -> list[tuple[Any, ...] | None]:
    """Returns the layouts of weights; None for a value that is no tensor."""
    return [layout(value) if isinstance(value, torch.Tensor) else None for value in values]


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns sizes, strides, dtype and device of a weight."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def check_replacements(
    layouts: Sequence[tuple[Any, ...] | None], values: Sequence[object], what_to_do: str
) -> None:
    """Raises WeightsLayoutError unless new weights have these layouts (None: no weight)."""
    for expected, value in zip(layouts, values, strict=True):
        if expected is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise WeightsLayoutError(
                f"parameters: expected those with which the module was compiled; got {value} in the place of "
                f"one. Put it back, or: {what_to_do}"
            )
        if layout(value) != expected:
            raise WeightsLayoutError(
                "parameters: expected them in the sizes, strides, dtype and device in which the module was "
                f"compiled; got one of {tuple(value.shape)}, strides {value.stride()}, {value.dtype} on "
                f"{value.device} in the place of another. {what_to_do}"
            )


class WeightChecks:
    """Decides which replays check parameters: once in `seconds` for each path; 0: every replay."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.are_always_due = not seconds
        self._last: dict[Hashable, float] = {}

    def is_due(self, path: Hashable) -> bool:
        """Returns whether the next replay of a path has to check, and notes that it does."""
        if self.are_always_due:
            return True
        now, last = time.monotonic(), self._last.get(path)
        if last is not None and now < last + self._seconds:
            return False
        self._last[path] = now
        return True

    def all_are_due(self) -> None:
        """Makes the next replay of every path check."""
        self._last.clear()


@dataclass(frozen=True)
class CaptureScope:
    """The settings, the memory and the ranks of one owner's captures."""

    config: EncoderConfig
    pool: GraphPool
    remaining_bytes: Callable[[], int | None] = lambda: None
    """What the memory limit leaves for more captures; None: there is no limit."""
    agree: Callable[[bool], bool] | None = None
    """For a forward with collectives: whether every rank says yes."""
    not_compiled: str = ""
    """Why nothing is compiled; empty: it is."""
    compares_kernels: bool = True
    """Whether attention kernels that were not compared yet are compared before captures."""
    weight_checks: WeightChecks | None = None
    """Which replays check the parameters that they read; None: none does, since the owner has."""

    @property
    def measured(self) -> bool:
        """Whether ways to run are timed: on a device, and not where ranks must choose the same."""
        return self.agree is None and self.pool.is_cuda

"""The capture request of a program at one size, and what the captures of one owner have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from fxsplit_encoder.capture.buffers import SharedBuffers, StaticBuffer
from fxsplit_encoder.capture.forward import CaptureRequest, ProgramBody, RowCount
from fxsplit_encoder.capture.inputs import StaticInputs
from fxsplit_encoder.capture.parameters import CheckedParameters
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import CaptureError, WeightsLayoutError

if TYPE_CHECKING:
    from fxsplit_encoder.compile.program import Bindings, NamedRegion

PaddingLogics: TypeAlias = Mapping[str, Callable[[Tensor, Tensor], None]]
"""By name, how a tower fills an input of a capture (first) from a value (second) itself."""


def request_of_program(
    region: NamedRegion,
    tokens: int,
    values: Mapping[str, Tensor],
    bindings: Bindings,
    parameters: CheckedParameters,
    shared: SharedBuffers,
    padding_logics: PaddingLogics | None = None,
) -> CaptureRequest:
    """Makes the request of a program over `values` of so many output tokens, which it takes over, and with it
    the one for a single segment; CaptureError where the trace does not hold for inputs of these sizes. A
    replay has to compare `parameters`.

    Args:
        bindings: with everything but the region's inputs in the slots.
    """
    program = region.program
    if not program.may_be_captured(bindings.symbols):
        raise CaptureError(
            f"the trace does not hold for {tokens} tokens: the code was traced for other sizes"
        )
    logics = padding_logics or {}
    buffers = {
        name: _buffer(region, name, tensor, logics.get(name), shared) for name, tensor in values.items()
    }
    rows = program.tokens(bindings)
    num_rows = RowCount(rows, program.device) if rows is not None else None
    if program.num_rows_slot is not None and num_rows is not None:
        bindings.slots[program.num_rows_slot] = num_rows.tensor
    rows = tokens if rows is None else rows

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

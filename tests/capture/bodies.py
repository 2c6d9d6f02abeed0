"""Capture requests of plain functions, as programs of one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fxsplit_encoder.capture.buffers import StaticBuffer
from fxsplit_encoder.capture.forward import CaptureRequest, ProgramBody
from fxsplit_encoder.capture.inputs import StaticInputs
from fxsplit_encoder.capture.parameters import StaticParameters
from fxsplit_encoder.compile.branches import Step
from fxsplit_encoder.compile.padding import PaddingReport
from fxsplit_encoder.compile.program import Bindings, Program, Ref

CPU = torch.device("cpu")


def piece(call: Callable[..., Any], args: Sequence[Any] = (), outputs: tuple[int, ...] = ()) -> Step:
    """A piece; `call` returns a sequence."""
    return Step("piece", "piece", call, tuple(args), {}, outputs, returns_tensor=False)


def split(call: Callable[..., Any], args: Sequence[Any] = (), output: int = -1, **kwargs: Any) -> Step:
    """A splitting op, which returns one value."""
    return Step("split", "split", call, tuple(args), kwargs, (output,), returns_tensor=True)


def body_of(steps: Sequence[Step], outputs: Sequence[int]) -> ProgramBody:
    """A program of these steps, which returns the values of some slots."""
    num_slots = 1 + max([*(slot for step in steps for slot in step.outputs), *outputs, 0])
    program = Program(
        steps=tuple(steps),
        num_inputs=0,
        num_slots=num_slots,
        num_rows_slot=None,
        constants={},
        static_inputs=frozenset(),
        symbol_sources=(),
        outputs=tuple(map(Ref, outputs)),
        output_infos=(None,) * len(outputs),
        input_shapes=(),
        token_symbol=None,
        region_start=0,
        region_inputs=(),
        region_symbols=(),
        device=CPU,
        padding=PaddingReport(()),
        accepts=lambda symbols: True,
    )
    return ProgramBody(program, Bindings([None] * num_slots))


def body_calling(
    call: Callable[[], Sequence[Any]], num_outputs: int = 1, *, can_break: bool = False
) -> ProgramBody:
    """A program of one piece; with a splitting op that does nothing after it, if it can break."""
    outputs = tuple(range(num_outputs))
    steps = [piece(call, outputs=outputs)]
    if can_break:
        steps.append(split(lambda: None))
    return body_of(steps, outputs)


def request_of(
    body: ProgramBody | Callable[[], Sequence[Any]],
    rows: int | None = 4,
    buffers: Iterable[StaticBuffer] = (),
    **fields: Any,
) -> CaptureRequest:
    """The request of a body over some static inputs."""
    return CaptureRequest(StaticInputs(buffers), body, StaticParameters([]), rows, **fields)

"""What a path gives to be captured at one size: of a compiled forward, or of the tower's own as it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from fxsplit_encoder.capture import (
    CaptureRequest,
    RowCount,
    SharedBuffers,
    StaticBuffer,
    StaticInputs,
    StaticParameters,
    request_over,
)
from fxsplit_encoder.compile import BoundProgram, Runner, Step
from fxsplit_encoder.errors import CaptureError
from fxsplit_encoder.manager.path_forward import PathForward
from fxsplit_encoder.protocol import EncoderCudaGraphPaddingLogic

PaddingLogics = Mapping[str, EncoderCudaGraphPaddingLogic]


def request_of_program(
    program: BoundProgram,
    values: Mapping[str, Tensor],
    budget: int,
    *,
    parameters: StaticParameters,
    padding_logics: PaddingLogics,
    shared: SharedBuffers,
) -> CaptureRequest:
    """The request of a compiled forward.

    Args:
        values: fresh inputs of the captured size.
        budget: that size in output tokens.
        shared: where inputs that every batch fills find their memory.

    Raises:
        CaptureError: the trace does not hold for inputs of these sizes.
    """
    if not program.program.may_be_captured(program.symbols(values)):
        raise CaptureError(
            f"the trace does not hold for {budget} tokens: the code was traced for other sizes"
        )
    rows = program.tokens(values)
    buffers = {
        name: _buffer(program, name, tensor, padding_logics.get(name), shared)
        for name, tensor in values.items()
    }
    num_rows = RowCount(rows, program.program.device) if rows is not None else None

    def forward(tensors: Mapping[str, Tensor], runner: Runner) -> list[Any]:
        bindings = program.program.begin(program.arguments(tensors))
        if program.program.num_rows_slot is not None and num_rows is not None:
            bindings.slots[program.program.num_rows_slot] = num_rows.tensor
        return program.program.finish(bindings, runner)

    return request_over(
        buffers,
        forward,
        parameters=parameters,
        segment_inputs=program.segment_inputs,
        rows=budget if rows is None else rows,
        num_rows=num_rows,
        can_break=bool(program.program.splits),
        frame_lengths=program.frame_lengths,
    )


def request_of_module(
    forward: PathForward,
    values: Mapping[str, Tensor],
    budget: int,
    *,
    padding_logics: PaddingLogics,
    growing: Collection[str],
    shared: SharedBuffers,
) -> CaptureRequest:
    """The request of a forward that is captured as it is.

    Args:
        growing: the inputs whose rows depend on the size. They are shared: every batch fills them. What
            always has the same size may be a constant, which a tower need not give again.
        values, budget, padding_logics, shared: as for `request_of_program`.
    """
    own = (StaticBuffer(name, tensor, 0, padding_logics.get(name)) for name, tensor in values.items())
    inputs = StaticInputs(shared.share(buffer) if buffer.name in growing else buffer for buffer in own)
    return CaptureRequest(
        inputs,
        StaticParameters.of_module(forward.tower),
        (),
        budget,
        None,
        _as_single_piece(forward, inputs.tensors),
        can_break=False,
        compiled=False,
        splitting_ops=forward.options.splitting_ops,
    )


def _buffer(
    program: BoundProgram,
    name: str,
    tensor: Tensor,
    padding_logic: EncoderCudaGraphPaddingLogic | None,
    shared: SharedBuffers,
) -> StaticBuffer:
    """A static input; in shared memory, if it is one that every batch fills."""
    if name in program.segment_inputs:  # replaced as a whole
        return shared.share(StaticBuffer(name, tensor, None))
    dim = program.token_dims.get(name)
    is_permutation = name in program.permutation_inputs
    buffer = StaticBuffer(
        name, tensor, 0 if dim is None else dim, padding_logic, is_permutation=is_permutation
    )
    return buffer if dim is None else shared.share(buffer)


def _as_single_piece(forward: PathForward, values: Mapping[str, Tensor]) -> Callable[[Runner], Sequence[Any]]:
    """The tower's forward as a program of a single piece: what is recorded goes through the runner."""
    whole = Step(
        kind="piece",
        name="forward",
        call=lambda: (forward(values),),
        args=(),
        kwargs={},
        outputs=(0,),
        returns_tensor=False,
    )
    return lambda runner: runner.run_piece(whole, ())

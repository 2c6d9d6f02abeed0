"""What a program gives to be captured at one size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.backend.budgets import ProgramBudgets
from fxsplit_encoder.capture import CaptureRequest, RowCount, StaticBuffer, StaticParameters, request_over
from fxsplit_encoder.capture.probe import padded_symbols
from fxsplit_encoder.capture.room import gibibytes, memory_of
from fxsplit_encoder.capture.segments import full_cu_seqlens
from fxsplit_encoder.compile import Bindings, Program, Runner
from fxsplit_encoder.compile.program import RegionInput
from fxsplit_encoder.errors import CaptureError, CaptureMemoryError


def input_name(slot: int) -> str:
    """What the static input of a slot is called."""
    return f"input {slot}"


def template_of(program: Program, bindings: Bindings) -> Bindings:
    """What all captures share that have a call's sizes but for the token count: parameters and constants."""
    template = Bindings([None] * program.num_slots, dict(bindings.symbols))
    for slot in program.fixed_slots:
        template.slots[slot] = bindings.slots[slot]
    return template


def request_of_program(
    program: Program, template: Bindings, rows: int, budget: int, budgets: ProgramBudgets
) -> CaptureRequest:
    """Of so many rows, with room for the segments of a budget.

    Raises:
        CaptureError: the trace does not hold for so many rows.
        CaptureMemoryError: the device's memory does not hold its inputs; none was made.
    """
    static = Bindings(list(template.slots), padded_symbols(program, template, rows))
    if not program.may_be_captured(static.symbols):
        raise CaptureError(f"the trace does not hold for {rows} tokens: the code was traced for other sizes")
    _check_memory(program, static.symbols, budget)
    buffers: dict[int, StaticBuffer] = {}
    for entry in program.region_inputs:
        buffers[entry.slot] = StaticBuffer(
            input_name(entry.slot),
            _example(program, entry, static, budget, rows, budgets),
            entry.token_dim,
            is_permutation=entry.is_permutation,
        )
    num_rows = None
    if program.num_rows_slot is not None:
        num_rows = RowCount(rows, program.device)
        static.slots[program.num_rows_slot] = num_rows.tensor
    frames = program.frame_lengths_slot if program.padding.segments_may_grow else None

    def forward(tensors: Mapping[str, Tensor], runner: Runner) -> list[Any]:
        slots = list(static.slots)
        for slot in buffers:
            slots[slot] = tensors[input_name(slot)]
        return program.finish(Bindings(slots, dict(static.symbols)), runner)

    return request_over(
        {buffer.name: buffer for buffer in buffers.values()},
        forward,
        parameters=StaticParameters(()),  # the dispatcher has seen every call's own
        segment_inputs=[input_name(entry.slot) for entry in program.region_inputs if entry.is_segments],
        rows=rows,
        num_rows=num_rows,
        can_break=bool(program.splits),
        frame_lengths=None if frames is None else input_name(frames),
    )


def has_room(program: Program, bindings: Bindings, rows: int) -> bool:
    """Whether the device's memory holds the region's inputs padded to so many rows."""
    return _input_bytes(program, padded_symbols(program, bindings, rows)) <= memory_of(program.device)


def _check_memory(program: Program, symbols: Mapping[str, int], budget: int) -> None:
    needed, memory = _input_bytes(program, symbols), memory_of(program.device)
    if needed > memory:
        raise CaptureMemoryError(
            f"token_budgets: {budget} output tokens take {gibibytes(needed)} of static inputs, and "
            f"{program.device} has {gibibytes(memory)}; list smaller budgets"
        )


def _input_bytes(program: Program, symbols: Mapping[str, int]) -> int:
    """Memory of the region's inputs at these sizes, but for the lengths of segments."""
    return sum(
        math.prod(size(symbols) for size in entry.info.shape) * entry.info.dtype.itemsize
        for entry in program.region_inputs
        if not entry.is_segments
    )


def _example(
    program: Program, entry: RegionInput, static: Bindings, budget: int, rows: int, budgets: ProgramBudgets
) -> Tensor:
    """A tensor of the captured size, with contents to record and to time the capture with."""
    device, dtype = program.device, entry.info.dtype
    if entry.is_segments and not program.padding.segments_may_grow:
        return full_cu_seqlens(entry.info.shape[0](static.symbols) - 1, rows, 1).to(device, dtype)
    if entry.is_segments:
        room = budgets.segment_entries(entry.slot, budget) - 1
        segments = 1 if budgets.counts_items(entry.slot) else room
        return full_cu_seqlens(room, rows, segments).to(device, dtype)
    tensor = torch.zeros([s(static.symbols) for s in entry.info.shape], dtype=dtype, device=device)
    if tensor.is_floating_point():
        tensor.normal_()  # zeros would make the times that `auto` compares too short
    return tensor

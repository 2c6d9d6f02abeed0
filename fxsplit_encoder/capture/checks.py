"""What `debug` checks at every replay, each a capture rule:

    1  pad rows are finite, of inputs and of outputs
    2  cumulative lengths rise from 0, end within the captured rows, and keep the captured bound
    6  inputs and outputs are where they were at the capture
    7  no output lies in memory that a caller was handed

They read values on the host, so a debugged replay waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.capture.buffers import StaticBuffer
from fxsplit_encoder.capture.eager_attention import Attended
from fxsplit_encoder.errors import ReplayError


def check_output_addresses(outputs: Sequence[Any], addresses: Sequence[int]) -> None:
    """Raises ReplayError if a captured output has moved (capture rule 6)."""
    now = [output.data_ptr() for output in outputs if isinstance(output, torch.Tensor)]
    for number, (address, captured) in enumerate(zip(now, addresses, strict=True)):
        if address != captured:
            raise ReplayError(
                f"capture rule 6: captured output {number} has moved from {captured:#x} to {address:#x}; "
                "outputs must not be resized or replaced"
            )


def check_lengths(name: str, cu_seqlens: Tensor, rows: int | None, attended: Attended | None) -> None:
    """Raises ReplayError unless captured cumulative lengths are ones (capture rule 2).

    Args:
        rows: those of the captured sequence; None: not known.
        attended: what the attentions that read them were captured with; None: not known.
    """
    lengths = cu_seqlens.tolist()
    if lengths[0] != 0:
        raise ReplayError(f"capture rule 2: {name}: starts at {lengths[0]}; cumulative lengths start at 0")
    for entry, (start, end) in enumerate(itertools.pairwise(lengths), start=1):
        if end < start:
            raise ReplayError(f"capture rule 2: {name}: entry {entry} falls from {start} to {end}")
        if attended is not None and end - start > attended.bound:
            raise ReplayError(
                f"capture rule 2: {name}: segment {entry - 1} has {end - start} rows; attention was captured "
                f"for at most {attended.bound}"
            )
    if rows is not None and lengths[-1] > rows:
        raise ReplayError(f"capture rule 2: {name}: ends at {lengths[-1]}; the capture has {rows} rows")


def check_input_padding(buffer: StaticBuffer) -> None:
    """Raises ReplayError unless the rows of an input that its last value left are finite (capture rule 1)."""
    if buffer.token_dim is not None:
        _check_finite(buffer.name, buffer.tensor, buffer.token_dim, buffer.dirty_rows)


def check_output_padding(outputs: Sequence[Any], real: int, rows: int) -> None:
    """Raises ReplayError unless the pad rows of outputs are finite (capture rule 1).

    Args:
        real: rows of the batch, of the `rows` that the capture has. An output has some rows for each of them,
            or one for some of them.
    """
    for number, output in enumerate(outputs):
        if isinstance(output, torch.Tensor) and output.dim():
            _check_finite(f"output {number}", output, 0, -(-real * output.shape[0] // rows))


def _check_finite(name: str, tensor: Tensor, dim: int, first: int) -> None:
    if not tensor.is_floating_point() or first >= tensor.shape[dim]:
        return
    pad = tensor.narrow(dim, first, tensor.shape[dim] - first)
    finite = pad.isfinite().movedim(dim, 0).flatten(1).all(1) if pad.dim() > 1 else pad.isfinite()
    if not finite.all():
        row = first + int((~finite).nonzero()[0])
        raise ReplayError(
            f"capture rule 1: {name}: pad row {row} is not finite; the batch ends at row {first}"
        )

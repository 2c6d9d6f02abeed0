"""The probe: whether padding is harmless where the analysis could not prove it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.compile import DIRECT, Frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fxsplit_encoder.compile import Program

# Relative to the largest output; padding may change the order of sums, never more than rounding.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def probe_padding(program: Program, frame: Frame, rows: int) -> str | None:
    """Runs the region once as it is and once padded to `rows` rows of NaN; returns why it may not be padded, or None.

    `frame` comes from `program.begin`, with fewer than `rows` tokens; it is not changed.
    """
    exact = Frame(list(frame.slots), dict(frame.symbols))
    program.move_to_device(exact)
    padded = Frame(list(exact.slots), padded_symbols(program, frame, rows))
    for entry in program.region_inputs:
        value = exact.slots[entry.slot]
        if entry.token_dim is not None:
            size = entry.info.shape[entry.token_dim](padded.symbols)
            padded.slots[entry.slot] = _pad_with_nan(value, entry.token_dim, size)
    try:
        with torch.no_grad():
            expected, got = program.finish(exact, DIRECT), program.finish(padded, DIRECT)
    except RuntimeError as error:
        return f"the padded run failed: {error}"
    return _difference(expected, got)


def padded_symbols(program: Program, frame: Frame, rows: int) -> dict[str, int]:
    """The symbols of a run padded to `rows` tokens."""
    assert program.token_symbol is not None
    return {**frame.symbols, program.token_symbol: rows}


def _pad_with_nan(value: Tensor, dim: int, size: int) -> Tensor:
    shape = list(value.shape)
    shape[dim] = size - shape[dim]
    fill = float("nan") if value.is_floating_point() else 0
    return torch.cat([value, value.new_full(shape, fill)], dim=dim)


def _difference(expected: Sequence[Any], got: Sequence[Any]) -> str | None:
    for number, (a, b) in enumerate(zip(expected, got, strict=True)):
        if not isinstance(a, torch.Tensor):
            continue
        real = b[tuple(slice(0, size) for size in a.shape)]
        if real.shape != a.shape:
            return f"output {number} has shape {tuple(b.shape)} when padded, {tuple(a.shape)} when not"
        if not a.is_floating_point():
            if not torch.equal(a, real):
                return f"output {number} changes when padded"
            continue
        error = (a.double() - real.double()).abs().max().item() if a.numel() else 0.0
        scale = a.double().abs().max().item() if a.numel() else 0.0
        # A NaN compares false, so it counts as a difference.
        if not error <= _TOLERANCE[a.dtype] * max(scale, 1e-6):
            return f"output {number} changes by {error:.3g} when padded with NaN rows"
    return None

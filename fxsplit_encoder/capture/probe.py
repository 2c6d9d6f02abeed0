"""The probe: whether padding is harmless where the analysis could not prove it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fxsplit_encoder.compile import Bindings, Program


# Relative to the largest output; padding may change the order of sums, never more than rounding.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def probe_padding(program: Program, bindings: Bindings, rows: int) -> str | None:
    """Why a region may not be padded to `rows` rows, from a run as it is and two padded ones; or None.

    Pad rows are NaN outside of every segment, as a replay's may be; then strange but finite rows that count
    as real, in a segment of their own, since masks would hide some of what padding can change (a maximum over
    tokens that are all positive).

    `bindings` comes from `program.begin`, with fewer than `rows` tokens; it is not changed.
    """
    exact = bindings.copy()
    program.move_to_device(exact)
    program.fill_num_rows(exact)
    poisoned = _padded(program, exact, rows, _nan_rows)
    adversarial = _padded(program, exact, rows, _adversarial_rows)
    for entry in program.region_inputs:
        if entry.is_segments:
            lengths = adversarial.slots[entry.slot]
            adversarial.slots[entry.slot] = torch.cat([lengths, lengths.new_full((1,), rows)])
    if program.num_rows_slot is not None:
        adversarial.slots[program.num_rows_slot] = torch.full_like(exact.slots[program.num_rows_slot], rows)
    try:
        with torch.no_grad():
            expected = program.finish(exact)
            refusal = difference(expected, program.finish(poisoned), "NaN")
            return refusal or difference(expected, program.finish(adversarial), "other")
    except (IndexError, RuntimeError) as error:
        return f"the padded run failed: {error}"


def padded_symbols(program: Program, bindings: Bindings, rows: int) -> dict[str, int]:
    """The symbols of a run padded to `rows` tokens."""
    assert program.token_symbol is not None
    return {**bindings.symbols, program.token_symbol: rows}


def _padded(
    program: Program, exact: Bindings, rows: int, pad_rows: Callable[[Tensor, int, int], Tensor]
) -> Bindings:
    """A bindings with pad rows; `pad_rows(value, dim, count)` makes those of an input."""
    padded = exact.copy()
    padded.symbols = padded_symbols(program, exact, rows)
    for entry in program.region_inputs:
        dim, value = entry.token_dim, exact.slots[entry.slot]
        if dim is not None:
            count = entry.info.shape[dim](padded.symbols) - value.shape[dim]
            padded.slots[entry.slot] = torch.cat([value, pad_rows(value, dim, count)], dim=dim)
    return padded


def _nan_rows(value: Tensor, dim: int, count: int) -> Tensor:
    shape = list(value.shape)
    shape[dim] = count
    return value.new_full(shape, float("nan") if value.is_floating_point() else 0)


def _adversarial_rows(value: Tensor, dim: int, count: int) -> Tensor:
    """The real rows again, larger and with both signs; indices as they are."""
    numbers = torch.arange(count, device=value.device)
    rows = value.index_select(dim, numbers % value.shape[dim])
    if not value.is_floating_point():
        return rows
    factors = (3 - 6 * (numbers % 2)).to(value.dtype)
    return rows * factors.view([-1 if d == dim else 1 for d in range(value.dim())])


def difference(expected: Sequence[Any], got: Sequence[Any], kind: str) -> str | None:
    """How the real rows of padded outputs differ from what is expected, by more than rounding; or None."""
    for number, (a, b) in enumerate(zip(expected, got, strict=True)):
        if not isinstance(a, torch.Tensor):
            continue
        real = b[tuple(slice(0, size) for size in a.shape)]
        if real.shape != a.shape:
            return f"output {number} has shape {tuple(b.shape)} when padded, {tuple(a.shape)} when not"
        if not a.is_floating_point():
            if not torch.equal(a, real):
                return f"output {number} changes when padded with {kind} rows"
            continue
        error = (a.double() - real.double()).abs().max().item() if a.numel() else 0.0
        scale = a.double().abs().max().item() if a.numel() else 0.0
        # A NaN compares false, so it counts as a difference.
        if not error <= _TOLERANCE[a.dtype] * max(scale, 1e-6):
            return f"output {number} changes by {error:.3g} when padded with {kind} rows"
    return None

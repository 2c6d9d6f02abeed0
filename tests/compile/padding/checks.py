"""What the tests of the proof share: tensors that do not depend on tokens, and checks of a verdict."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fxsplit_encoder.compile import Bindings, BoundProgram

from ..packed_forwards import WIDTH, packed_inputs, trace_packed

Forward = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""From what attention returns, a row a token, and the inputs of `packed_forwards`."""

_generator = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(WIDTH, WIDTH, generator=_generator)
BIAS = torch.randn(WIDTH, generator=_generator)


def assert_proved(forward: Forward) -> None:
    """The padding is proved, and changes no real row."""
    bound = trace_packed(forward)
    report = bound.program.padding
    assert report.proved, str(report)
    assert report.may_probe
    for poison in (float("nan"), 7.0):
        assert_real_rows_unchanged(bound, packed_inputs(8), 20, poison)


def assert_refused(forward: Forward, reason: str) -> None:
    """The padding is not proved, and the reason has these words."""
    report = trace_packed(forward).program.padding
    assert not report.proved
    assert reason in str(report)
    assert str(report).startswith(report.reasons[0][0])


def assert_real_rows_unchanged(
    bound: BoundProgram, inputs: dict[str, Tensor], rows: int, poison: float
) -> None:
    """Runs the program exactly and padded to `rows` rows of poison, and compares what both have."""
    program = bound.program
    exact = program.begin(bound.arguments(inputs))
    assert program.token_symbol is not None
    padded = Bindings(list(exact.slots), {**exact.symbols, program.token_symbol: rows})
    for entry in program.region_inputs:
        value = exact.slots[entry.slot]
        if entry.is_segments:
            tail = torch.tensor([(int(value[-1]) + rows) // 2, rows], dtype=torch.int32)
            padded.slots[entry.slot] = torch.cat((value, tail))
        elif entry.token_dim is not None:
            size = entry.info.shape[entry.token_dim](padded.symbols)
            shape = list(value.shape)
            shape[entry.token_dim] = size - shape[entry.token_dim]
            filler = value.new_full(shape, poison if value.is_floating_point() else 0)
            padded.slots[entry.slot] = torch.cat((value, filler), dim=entry.token_dim)
    if program.num_rows_slot is not None:
        # Without the masks, whose zeros would hide the poison.
        padded.slots[program.num_rows_slot] = torch.tensor(rows)
    with torch.no_grad():
        (expected,), (got,) = program.finish(exact), program.finish(padded)
    real = got[tuple(slice(0, n) for n in expected.shape)]
    torch.testing.assert_close(real, expected, rtol=1e-4, atol=1e-5, equal_nan=True)

"""The probe: an operation without a rule may be padded if that is seen to be harmless, and only then."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.capture.probe import padded_symbols, probe_padding
from fxsplit_encoder.compile import BoundProgram, CompileOptions, trace_forward

After = Callable[[Tensor], Tensor]


def trace(after: After) -> BoundProgram:
    def forward(inputs: Mapping[str, Tensor]) -> Tensor:
        q = inputs["x"].view(-1, 2, 4)
        return after(torch.ops.fxsplit.varlen_attention(q, q, q, inputs["cu"], q.shape[0], 0.5).view(-1, 8))

    options = CompileOptions(("fxsplit::varlen_attention",), "eager")
    return trace_forward(forward, inputs(12), {"x": [0], "cu": [0]}, options)


def inputs(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.tensor([0, rows // 3, rows], dtype=torch.int32)
    return {"x": torch.randn(rows, 8, generator=generator), "cu": lengths}


def probe(program: BoundProgram, rows: int = 7, padded: int = 16) -> str | None:
    bindings = program.program.begin(program.arguments(inputs(rows)))
    before = list(bindings.slots)
    refusal = probe_padding(program.program, bindings, padded)
    assert all(a is b for a, b in zip(bindings.slots, before, strict=True))
    return refusal


def sorted_within_rows(x: Tensor) -> Tensor:
    return x.sort(dim=1).values * 2


def sorted_over_rows(x: Tensor) -> Tensor:
    return x.sort(dim=0).values


@pytest.mark.parametrize(
    ("after", "harmless"),
    [
        (sorted_within_rows, True),
        (lambda x: torch.fft.rfft(x, dim=1).real, True),
        (lambda x: x + x.mean(0), False),
        (lambda x: x - x.logsumexp(0), False),
        (sorted_over_rows, False),
        (lambda x: x.flip(0), False),
        (lambda x: x / x.shape[0], False),
        (lambda x: x.cummax(1).indices, True),
        (lambda x: x.argsort(0), False),
        # The pad rows of attention are masked to zero, which hides what these do where tokens are positive.
        (lambda x: x.exp() - x.exp().amax(0), False),
        (lambda x: x.abs() - x.abs().cummax(0).values, True),
        (lambda x: x + x.sum(0), False),
    ],
)
def test_only_what_leaves_the_real_rows_alone_is_harmless(after: After, harmless: bool) -> None:
    program = trace(after)
    refusal = probe(program)
    assert (refusal is None) is harmless
    if not program.program.padding.proved:
        assert str(program.program.padding)
    assert not (program.program.padding.proved and not harmless)


def test_the_reason_names_the_output_and_the_change() -> None:
    assert re.fullmatch(
        r"output 0 changes by \d\S+ when padded with NaN rows", str(probe(trace(lambda x: x + x.mean(0))))
    )
    assert probe(trace(lambda x: x.argsort(0))) == "output 0 changes when padded with NaN rows"
    assert str(probe(trace(lambda x: x + x.sum(0)))).endswith("when padded with other rows")


def test_indices_of_pad_rows_are_in_range() -> None:
    table = torch.randn(3, 8)
    program = trace(lambda x: x + table[(x[:, 0] * 0).long() + 2])
    assert not program.program.padding.proved
    assert program.program.padding.may_probe is False


def test_a_padded_run_that_fails_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = trace(sorted_within_rows)
    program = bound.program
    bindings = program.begin(bound.arguments(inputs(7)))
    finish, calls = type(program).finish, []

    def fail_second(self: Any, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("sizes differ")
        return finish(self, *args)

    monkeypatch.setattr(type(program), "finish", fail_second)
    assert probe_padding(program, bindings, 16) == "the padded run failed: sizes differ"


def test_only_the_token_count_is_padded() -> None:
    program = trace(sorted_within_rows)
    bindings = program.program.begin(program.arguments(inputs(7)))
    padded = padded_symbols(program.program, bindings, 16)
    changed = {name for name in padded if padded[name] != bindings.symbols[name]}
    assert changed == {program.program.token_symbol}
    assert padded[program.program.token_symbol] == 16

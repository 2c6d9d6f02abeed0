"""What the tests of the proof share: tensors that do not depend on tokens, and checks of a verdict."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.aot import to_aten
from fxsplit_encoder.compile.build import build_program
from fxsplit_encoder.compile.options import CompileOptions
from fxsplit_encoder.compile.program import Bindings, BoundProgram, Program, bind

from ..packed_forwards import SPLITTING_OPS, WIDTH, attend, packed_inputs, trace_packed

Forward = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""From what attention returns, a row per token, and the inputs of `packed_forwards`."""

_generator = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(WIDTH, WIDTH, generator=_generator)
BIAS = torch.randn(WIDTH, generator=_generator)
_PER_TRACE = 30  # each adds guards that all of its trace are asked about


def trace_each(forwards: Mapping[str, Forward], alone: Collection[str] = ()) -> dict[str, BoundProgram]:
    """A program for each forward, built of its own nodes as if the graph had no others. A trace serves many
    of them, since it costs far more than the proof.

    Args:
        alone: the forwards whose traces assume something of the token count, which would then be assumed of
            the others too; each has a trace of its own.
    """
    programs = {name: trace_packed(forwards[name]) for name in alone}
    together = [name for name in forwards if name not in programs]
    for start in range(0, len(together), _PER_TRACE):
        programs |= _trace_together({name: forwards[name] for name in together[start : start + _PER_TRACE]})
    for name in together:
        assert programs[name].program.padding.divisor == 1, "one of these forwards has to be traced alone"
    return {name: programs[name] for name in forwards}


def _trace_together(forwards: Mapping[str, Forward]) -> dict[str, BoundProgram]:
    programs: dict[str, Program] = {}
    bound: dict[str, BoundProgram] = {}
    examples = packed_inputs(12)

    def call(inputs: Mapping[str, Tensor]) -> list[Tensor]:
        y = attend(inputs["x"], inputs["cu"])
        return [forward(y, inputs) for forward in forwards.values()]

    def build(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        metadata = torch._guards.TracingContext.get().fw_metadata
        assert metadata is not None
        options = CompileOptions(SPLITTING_OPS, "eager")
        for number, name in enumerate(forwards):
            single = _with_output(module, number)
            programs[name] = build_program(single, metadata.static_input_indices, options)

        def run(*args: Any) -> Any:
            outputs = module(*args)
            for (name, program), output in zip(programs.items(), outputs, strict=True):
                bound[name] = bind(program, list(args), [output], examples)
            return outputs

        return run

    for tensor in examples.values():
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    torch._dynamo.reset()  # it counts the compilations of `call`
    with torch.no_grad():
        torch.compile(call, backend=lambda *args: to_aten(*args, build), fullgraph=True)(examples)
    return bound


def _with_output(module: fx.GraphModule, number: int) -> fx.GraphModule:
    """A copy of a graph with one of its outputs, and the nodes that it needs."""
    graph = copy.deepcopy(module.graph)
    node: Any = graph.output_node()
    node.args = ((node.args[0][number],),)
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)


def assert_proved(bound: BoundProgram) -> None:
    """The padding is proved, and changes no real row."""
    report = bound.program.padding
    assert report.proved, str(report)
    for poison in (float("nan"), 7.0):
        _assert_real_rows_unchanged(bound, poison)


def assert_refused(bound: BoundProgram, reason: str) -> None:
    """The padding is not proved, and the reason has these words."""
    report = bound.program.padding
    assert not report.proved
    assert reason in str(report)
    assert str(report).startswith(report.reasons[0][0])


def _assert_real_rows_unchanged(bound: BoundProgram, poison: float, rows: int = 20) -> None:
    """Runs the program exactly and padded to `rows` rows of poison, and compares what both have."""
    program = bound.program
    exact = program.begin(bound.arguments(packed_inputs(8)))
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

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.compile import Bindings, BoundProgram
from fxsplit_encoder.compile.program import Ref
from fxsplit_encoder.compile.sizes import Size


def layered(y: Tensor, inputs: Any) -> Tensor:
    """Three attentions, a value that lives across all of them, and one that dies early."""
    skip = y.sigmoid()
    for _ in range(2):
        q = (y.tanh() + inputs["x"]).view(-1, 2, 4)
        y = torch.ops.fxsplit.varlen_attention(q, q, q, inputs["cu"], q.shape[0], 0.5).view(-1, 8)
    return y * skip


@pytest.fixture(scope="module")
def bound(trace: Any) -> Iterator[BoundProgram]:
    yield trace(layered)


def slots_of(argument: Any) -> Iterator[int]:
    if isinstance(argument, Ref):
        yield argument.slot
    elif isinstance(argument, list | tuple):
        for entry in argument:
            yield from slots_of(entry)


def test_steps_alternate_between_pieces_and_splits(bound: BoundProgram) -> None:
    program = bound.program
    assert [step.kind for step in program.steps] == ["piece", "split"] * 3 + ["piece"]
    assert len(program.pieces) == 4
    assert len(program.splits) == 3
    assert program.host_steps == []
    assert {step.distinct for step in program.pieces} == set(range(program.num_distinct))
    assert all(step.distinct == -1 for step in program.splits)


def test_no_slot_is_read_after_it_is_freed(bound: BoundProgram) -> None:
    freed: set[int] = set()
    for step in bound.program.steps:
        reads = set(slots_of((step.args, tuple(step.kwargs.values()))))
        assert not reads & freed
        assert not set(step.frees) & freed
        freed |= set(step.frees)
    assert not set(slots_of(bound.program.outputs)) & freed
    assert not freed & (
        bound.program.static_inputs | set(range(bound.program.num_inputs)) | set(bound.program.constants)
    )


def test_every_intermediate_value_is_freed_at_its_last_use(bound: BoundProgram, inputs: Any) -> None:
    program = bound.program
    bindings = program.begin(bound.arguments(inputs(9)))
    program.finish(bindings)
    kept = {i for i, value in enumerate(bindings.slots) if value is not None}
    expected = set(range(program.num_inputs)) | set(program.constants) | set(slots_of(program.outputs))
    if program.num_rows_slot is not None:
        expected.add(program.num_rows_slot)
    assert kept - {i for i in kept if not isinstance(bindings.slots[i], Tensor)} <= expected
    assert any(step.frees for step in program.steps[:-1])


def test_freeing_releases_the_memory(bound: BoundProgram, inputs: Any) -> None:
    import gc
    import weakref

    program = bound.program
    made: list[weakref.ref[Tensor]] = []

    def watch(step: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = step.call(*args, **kwargs)
            made.extend(map(weakref.ref, (result,) if step.returns_tensor else result))
            return result

        return replace(step, call=call)

    bindings = program.begin(bound.arguments(inputs(9)))
    outputs = replace(program, steps=tuple(map(watch, program.steps))).finish(bindings)
    gc.collect()
    alive = [ref() for ref in made if ref() is not None]
    assert len(made) > 6
    assert [id(t) for t in alive] == [id(outputs[0])]


def test_the_steps_of_the_region_may_be_called_one_by_one(bound: BoundProgram, inputs: Any) -> None:
    program = bound.program
    bindings = program.begin(bound.arguments(inputs(9)))
    program.fill_num_rows(bindings)
    for step in program.region:
        args, kwargs = bindings.arguments(step)
        bindings.store(step, step.call(*args, **kwargs))
    torch.testing.assert_close(program.results(bindings)[0], bound(inputs(9)), rtol=0, atol=0)


def test_the_inputs_of_the_region_say_what_counts_tokens(bound: BoundProgram) -> None:
    program = bound.program
    by_name = {bound.names[entry.slot]: entry for entry in program.region_inputs}
    assert set(by_name) == {"x", "cu"}
    assert by_name["x"].token_dim == 0
    assert not by_name["x"].is_segments
    assert by_name["cu"].token_dim is None
    assert by_name["cu"].is_segments
    assert str(by_name["x"].info.shape[0]) == program.token_symbol
    assert by_name["x"].info.dtype == torch.float32
    assert program.region_symbols == ()
    info = program.output_infos[0]
    assert info is not None
    assert [size({program.token_symbol: 5}) for size in info.shape if program.token_symbol] == [5, 8]


def test_begin_reads_the_symbols_and_counts_the_tokens(bound: BoundProgram, inputs: Any) -> None:
    bindings = bound.program.begin(bound.arguments(inputs(9)))
    assert bound.program.tokens(bindings) == 9
    assert 3 in bindings.symbols.values()


def test_running_does_not_change_the_inputs(bound: BoundProgram, inputs: Any) -> None:
    values = inputs(9)
    copies = {name: value.clone() for name, value in values.items()}
    first = bound(values).clone()
    bound(inputs(30))
    torch.testing.assert_close(bound(values), first, rtol=0, atol=0)
    assert all(torch.equal(values[name], copies[name]) for name in copies)


def test_arguments_resolve_where_they_are_nested() -> None:
    bindings = Bindings(["a", "b"], {"T": 7})
    size = Size.of(3)
    assert bindings.value([Ref(1), (size, Ref(0)), None, 2.5]) == ["b", (3, "a"), None, 2.5]

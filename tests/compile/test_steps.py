"""When steps beside others are waited for, and how long the memory that they touch is kept."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.compile.branches import Step
from fxsplit_encoder.compile.build import slots_in, with_frees, with_joins
from fxsplit_encoder.compile.program import Ref


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Steps that each read some of the slots that are filled, and fill the next."""
    steps: list[Step] = []
    for number in range(draw(st.integers(1, 12))):
        reads = draw(st.lists(st.integers(0, number), unique=True, max_size=3))
        beside = draw(st.booleans())
        args = tuple(map(Ref, reads))
        steps.append(Step("piece", str(number), print, args, {}, (number + 1,), False, beside=beside))
    return steps


@settings(max_examples=100)
@given(programs(), st.data())
def test_nothing_is_read_too_early_or_freed_too_soon(steps: list[Step], data: st.DataObject) -> None:
    kept = {0, *data.draw(st.sets(st.integers(0, len(steps))))}
    program = with_frees(with_joins(steps), kept)
    written_beside: set[int] = set()
    touched_beside: set[int] = set()
    freed: set[int] = set()
    for step in program:
        reads = set(slots_in(step.args))
        assert not reads & freed
        if step.beside:
            assert not step.joins
            written_beside |= set(step.outputs)
            touched_beside |= {*step.outputs, *reads}
        else:
            assert step.joins == bool(reads & written_beside)
        if step.joins:
            written_beside.clear()
            touched_beside.clear()
        assert not set(step.frees) & touched_beside
        assert not set(step.frees) & freed
        freed |= set(step.frees)
    assert not freed & kept
    # Everything else goes as soon as it may: what is left was touched beside and never joined.
    assert set(range(len(steps) + 1)) - kept - freed <= touched_beside


@settings(max_examples=40)
@given(programs())
def test_steps_that_all_run_in_order_are_as_before(steps: list[Step]) -> None:
    inline = [replace(step, beside=False) for step in steps]
    marked = with_joins(inline)
    assert marked == inline
    last: dict[int, int] = {}
    for index, step in enumerate(inline):
        last.update(dict.fromkeys((*step.outputs, *slots_in(step.args)), index))
    freed = {slot: index for index, step in enumerate(with_frees(marked, {0})) for slot in step.frees}
    assert freed == {slot: index for slot, index in last.items() if slot != 0}

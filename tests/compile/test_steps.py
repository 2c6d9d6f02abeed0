"""When steps beside others are waited for, how long their memory is kept, and how they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.compile import branches
from fxsplit_encoder.compile.branches import Step, StepBranches
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


# --- how they are run

CPU = torch.device("cpu")


class NotedBranch:
    notes: list[str]

    def __init__(self, device: torch.device, purpose: str) -> None:
        self.purpose = purpose

    def fork(self) -> None:
        self.notes.append(f"fork {self.purpose}")

    def join(self) -> None:
        self.notes.append(f"join {self.purpose}")

    def __enter__(self) -> None:
        self.notes.append(f"enter {self.purpose}")

    def __exit__(self, *raised: object) -> None:
        self.notes.append(f"leave {self.purpose}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    NotedBranch.notes = []
    monkeypatch.setattr(branches, "Branch", NotedBranch)
    return NotedBranch.notes


def step(name: str, notes: list[str], kind: str = "piece", **marks: bool) -> Step:
    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        notes.append(name)
        return (name, args, kwargs)

    return Step(kind, name, call, (), {}, (), False, **marks)


def test_steps_are_placed_as_they_are_marked(notes: list[str]) -> None:
    run = StepBranches(CPU)
    assert run.placed(step("first", notes))(1, a=2) == ("first", (1,), {"a": 2})
    assert run.placed(step("aside", notes, beside=True))(3, b=4) == ("aside", (3,), {"b": 4})
    run.placed(step("next", notes))()
    run.placed(step("aside 2", notes, beside=True))()
    assert run.placed(step("reads", notes, joins=True))(5, c=6) == ("reads", (5,), {"c": 6})
    run.placed(step("reads again", notes, joins=True))()
    run.join()
    run.placed(step("aside 3", notes, beside=True))()
    run.join()
    run.join()
    assert notes == [
        *("first", "fork steps", "enter steps", "aside", "leave steps"),
        *("next", "fork steps", "enter steps", "aside 2", "leave steps"),
        *("join steps", "reads", "reads again"),
        *("fork steps", "enter steps", "aside 3", "leave steps", "join steps"),
    ]


def test_between_graphs_every_step_runs_in_order(notes: list[str]) -> None:
    run = StepBranches(CPU, active=False)
    for each in (step("aside", notes, beside=True), step("reads", notes, joins=True)):
        assert run.placed(each) is each.call
        run.placed(each)()
    run.join()
    assert notes == ["aside", "reads"]

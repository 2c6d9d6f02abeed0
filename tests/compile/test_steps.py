"""When steps beside others are waited for, how long their memory is kept, and how they run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder._torch import streams
from fxsplit_encoder.compile.branches import Step, StepBranches
from fxsplit_encoder.compile.build import slots_in, with_frees, with_joins
from fxsplit_encoder.compile.program import Ref

from ..capture.bodies import FakeCuda, FakeStream


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Steps that each read some of the slots that are filled, and fill the next."""
    steps: list[Step] = []
    for number in range(draw(st.integers(1, 12))):
        reads = draw(st.lists(st.integers(0, number), unique=True, max_size=3))
        beside = draw(st.booleans())
        args = tuple(map(Ref, reads))
        steps.append(Step("piece", str(number), print, args, {}, (number + 1,), beside=beside))
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


# --- how they are run: on streams that only take notes

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda(monkeypatch)
    made = SimpleNamespace(sibling=lambda main, purpose: FakeStream(fake, purpose))
    monkeypatch.setattr(streams, "capture_streams", lambda device: made)
    return fake


def step(name: str, cuda: FakeCuda, **marks: bool) -> Step:
    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        cuda.events.append(f"{name} on {cuda.current.name}")
        return (name, args, kwargs)

    return Step("piece", name, call, (), {}, (), **marks)


def test_steps_are_placed_as_they_are_marked(cuda: FakeCuda) -> None:
    branches = StepBranches(GPU)
    assert branches.run(step("first", cuda), 1, a=2) == ("first", (1,), {"a": 2})
    assert branches.run(step("aside", cuda, beside=True), 3, b=4) == ("aside", (3,), {"b": 4})
    branches.run(step("next", cuda))
    branches.run(step("aside 2", cuda, beside=True))
    assert branches.run(step("reads", cuda, joins=True), 5, c=6) == ("reads", (5,), {"c": 6})
    branches.run(step("reads again", cuda, joins=True))
    branches.join()
    branches.run(step("aside 3", cuda, beside=True))
    branches.join()
    branches.join()
    assert cuda.events == [
        *("first on stream", "steps waits for stream", "aside on steps"),
        *("next on stream", "steps waits for stream", "aside 2 on steps"),
        *("stream waits for steps", "reads on stream", "reads again on stream"),
        *("steps waits for stream", "aside 3 on steps", "stream waits for steps"),
    ]


@pytest.mark.parametrize(("device", "active"), [(GPU, False), (CPU, True)], ids=["between graphs", "CPU"])
def test_elsewhere_every_step_runs_in_order(device: torch.device, active: bool, cuda: FakeCuda) -> None:
    branches = StepBranches(device, active=active)
    for each in (step("aside", cuda, beside=True), step("reads", cuda, joins=True)):
        branches.run(each)
    branches.join()
    assert cuda.events == ["aside on stream", "reads on stream"]

"""When steps beside others are waited for, how long their memory is kept, and how they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder._torch import streams as streams_module
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


# --- how they are run: on streams that only take notes

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class FakeStreams:
    """Stands for `torch.cuda` and a GPU's streams: who waited for whom is noted."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.current = FakeStream(self, "main")

    def sibling(self, main: FakeStream, purpose: str) -> FakeStream:
        return FakeStream(self, purpose)

    @contextmanager
    def entered(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class FakeStream:
    def __init__(self, streams: FakeStreams, name: str) -> None:
        self.streams, self.name, self.device = streams, name, GPU

    def wait_stream(self, other: FakeStream) -> None:
        self.streams.notes.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    fakes = FakeStreams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fakes.current)
    monkeypatch.setattr(torch.cuda, "stream", fakes.entered)
    monkeypatch.setattr(streams_module, "capture_streams", lambda device: fakes)
    return fakes


def step(name: str, streams: FakeStreams, kind: str = "piece", **marks: bool) -> Step:
    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        streams.notes.append(f"{name} on {streams.current.name}")
        return (name, args, kwargs)

    return Step(kind, name, call, (), {}, (), False, **marks)


def test_steps_are_placed_as_they_are_marked(streams: FakeStreams) -> None:
    run = StepBranches(GPU)
    assert run.placed(step("first", streams))(1, a=2) == ("first", (1,), {"a": 2})
    assert run.placed(step("aside", streams, beside=True))(3, b=4) == ("aside", (3,), {"b": 4})
    run.placed(step("next", streams))()
    run.placed(step("aside 2", streams, beside=True))()
    assert run.placed(step("reads", streams, joins=True))(5, c=6) == ("reads", (5,), {"c": 6})
    run.placed(step("reads again", streams, joins=True))()
    run.join()
    run.placed(step("aside 3", streams, beside=True))()
    run.join()
    run.join()
    assert streams.notes == [
        *("first on main", "steps waits for main", "aside on steps"),
        *("next on main", "steps waits for main", "aside 2 on steps"),
        *("main waits for steps", "reads on main", "reads again on main"),
        *("steps waits for main", "aside 3 on steps", "main waits for steps"),
    ]


@pytest.mark.parametrize(("device", "active"), [(GPU, False), (CPU, True)], ids=["between graphs", "CPU"])
def test_elsewhere_every_step_runs_in_order(device: torch.device, active: bool, streams: FakeStreams) -> None:
    run = StepBranches(device, active=active)
    for each in (step("aside", streams, beside=True), step("reads", streams, joins=True)):
        run.placed(each)()
    run.join()
    assert streams.notes == ["aside on main", "reads on main"]

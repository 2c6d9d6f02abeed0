"""Steps beside others, with a branch that takes notes in place of streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxsplit_encoder.compile import branches as steps
from fxsplit_encoder.compile.branches import Step, StepBranches

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
    monkeypatch.setattr(steps, "Branch", NotedBranch)
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
    assert notes == [
        *("first", "fork steps", "enter steps", "aside", "leave steps"),
        *("next", "fork steps", "enter steps", "aside 2", "leave steps"),
        *("join steps", "reads", "reads again"),
    ]


def test_what_nobody_has_waited_for_ends_with_the_run(notes: list[str]) -> None:
    run = StepBranches(CPU)
    run.placed(step("aside", notes, beside=True))()
    run.join()
    run.join()
    assert notes[-1] == "join steps"
    assert notes.count("join steps") == 1


def test_between_graphs_every_step_runs_in_order(notes: list[str]) -> None:
    run = StepBranches(CPU, active=False)
    for each in (step("aside", notes, beside=True), step("reads", notes, joins=True)):
        assert run.placed(each) is each.call
        run.placed(each)()
    run.join()
    assert notes == ["aside", "reads"]

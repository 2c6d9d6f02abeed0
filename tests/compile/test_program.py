import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.compile.program import BoundProgram

from .packed_forwards import attend, packed_inputs, trace_packed


def layered(y: Tensor, inputs: Any) -> Tensor:
    """Three attentions, a value that lives across all of them, and one that dies early."""
    skip = y.sigmoid()
    for _ in range(2):
        y = attend(y.tanh() + inputs["x"], inputs["cu"])
    return y * skip


@pytest.fixture(scope="module")
def bound() -> BoundProgram:
    return trace_packed(layered)


def test_freeing_releases_the_memory(bound: BoundProgram) -> None:
    program = bound.program
    made: list[weakref.ref[Tensor]] = []

    def watch(step: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = step.call(*args, **kwargs)
            made.extend(map(weakref.ref, (result,) if step.returns_tensor else result))
            return result

        return replace(step, call=call)

    bindings = program.begin(bound.arguments(packed_inputs(9)))
    outputs = replace(program, steps=tuple(map(watch, program.steps))).finish(bindings)
    gc.collect()
    alive = [ref() for ref in made if ref() is not None]
    assert len(made) > 6
    assert [id(t) for t in alive] == [id(outputs[0])]


def test_the_steps_of_the_region_may_be_called_one_by_one(bound: BoundProgram) -> None:
    program = bound.program
    bindings = program.begin(bound.arguments(packed_inputs(9)))
    program.fill_num_rows(bindings)
    for step in program.region:
        args, kwargs = bindings.arguments(step)
        bindings.store(step, step.call(*args, **kwargs))
    torch.testing.assert_close(program.results(bindings)[0], bound(packed_inputs(9)), rtol=0, atol=0)

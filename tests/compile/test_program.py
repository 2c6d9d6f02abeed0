import gc
import weakref
from dataclasses import replace
from typing import Any

from torch import Tensor

from .packed_forwards import attend, packed_inputs, trace_packed


def layered(y: Tensor, inputs: Any) -> Tensor:
    """Three attentions, a value that lives across all of them, and one that dies early."""
    skip = y.sigmoid()
    for _ in range(2):
        y = attend(y.tanh() + inputs["x"], inputs["cu"])
    return y * skip


def test_freeing_releases_the_memory() -> None:
    bound = trace_packed(layered)
    program = bound.program
    made: list[weakref.ref[Tensor]] = []

    def watch(step: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = step.call(*args, **kwargs)
            made.extend(map(weakref.ref, (result,) if isinstance(result, Tensor) else result))
            return result

        return replace(step, call=call)

    bindings = program.begin(bound.arguments(packed_inputs(9)))
    outputs = replace(program, steps=tuple(map(watch, program.steps))).finish(bindings)
    gc.collect()
    alive = [ref() for ref in made if ref() is not None]
    assert len(made) > 6
    assert [id(t) for t in alive] == [id(outputs[0])]

"""Fixtures of the tests of managers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from fxsplit_encoder.compile import trace
from fxsplit_encoder.errors import CompileError
from fxsplit_encoder.manager.tower import named_tensors

_traced: dict[Any, Any] = {}
"""By what was traced: the program, with the names of its tensors in the tower, or the error."""


@pytest.fixture(scope="module")
def traced_once() -> Iterator[None]:
    """Towers of one class share a trace, each with weights of its own; for towers whose forward reads nothing
    else of their instances.
    """
    own = trace.trace_forward

    def shared(forward: Any, inputs: Mapping[str, Tensor], dims: Any, options: Any, module: Any) -> Any:
        shapes = {name: tensor.shape for name, tensor in inputs.items()}
        tower = forward.__self__.tower
        key = type(tower), f"{shapes} {dims} {replace(options, progress=None)}"
        tensors = named_tensors(tower)
        if key not in _traced:
            try:
                program = own(forward, inputs, dims, options, module)
            except CompileError as error:
                _traced[key] = error
            else:
                names = {id(tensor): name for name, tensor in tensors.items()}
                _traced[key] = program, [names.get(id(each)) for each in program.fixed]
        if isinstance(_traced[key], CompileError):
            raise _traced[key]
        program, names_of_fixed = _traced[key]
        fixed = zip(names_of_fixed, program.fixed, strict=True)
        return replace(program, fixed=tuple(tensors.get(name, each) for name, each in fixed))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "trace_forward", shared)
        yield

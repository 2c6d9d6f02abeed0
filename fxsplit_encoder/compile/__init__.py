"""FX only: a Dynamo graph becomes an ATen graph, is split at attention, and becomes a compiled `Program`.

Knows nothing of CUDA graphs or models. What compiles loads Dynamo and sympy, which take seconds, so it is
imported when it is used first.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fxsplit_encoder.compile.branches import Step
from fxsplit_encoder.compile.options import CompileOptions, HostOp, register_host_op

if TYPE_CHECKING:
    from fxsplit_encoder.compile.build import build_program
    from fxsplit_encoder.compile.padding import PaddingReport
    from fxsplit_encoder.compile.program import Bindings, BoundProgram, NamedRegion, Program, RegionInput
    from fxsplit_encoder.compile.trace import compile_graph, trace_forward, with_own_code

__all__ = [
    "Bindings",
    "BoundProgram",
    "CompileOptions",
    "HostOp",
    "NamedRegion",
    "PaddingReport",
    "Program",
    "RegionInput",
    "Step",
    "build_program",
    "compile_graph",
    "register_host_op",
    "trace_forward",
    "with_own_code",
]

_WHEN_USED = {
    **dict.fromkeys(("Bindings", "BoundProgram", "NamedRegion", "Program", "RegionInput"), "program"),
    **dict.fromkeys(("compile_graph", "trace_forward", "with_own_code"), "trace"),
    "PaddingReport": "padding",
    "build_program": "build",
}
"""The modules of names that are imported when they are used."""


def __getattr__(name: str) -> Any:
    if name not in _WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHEN_USED[name]}"), name)
    globals()[name] = value
    return value

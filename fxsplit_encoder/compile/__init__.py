"""FX only: a Dynamo graph becomes an ATen graph, is split at attention, and becomes a compiled `Program`.

Knows nothing of CUDA graphs or models.
"""

from fxsplit_encoder.compile.bound import BoundProgram, NamedRegion
from fxsplit_encoder.compile.build import build_program
from fxsplit_encoder.compile.host import HostOp, register_host_op
from fxsplit_encoder.compile.options import CompileOptions
from fxsplit_encoder.compile.padding import PaddingReport
from fxsplit_encoder.compile.program import Bindings, Program, RegionInput, Step
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

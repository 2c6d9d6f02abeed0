"""FX only: a Dynamo graph becomes an ATen graph, is split at attention, and becomes a compiled `Program`.

Knows nothing of CUDA graphs or models.
"""

from fxsplit_encoder.compile.bound import BoundProgram
from fxsplit_encoder.compile.build import build_program
from fxsplit_encoder.compile.host import HostOp, register_host_op
from fxsplit_encoder.compile.options import CompileOptions
from fxsplit_encoder.compile.padding import PaddingReport
from fxsplit_encoder.compile.program import DIRECT, Bindings, Program, RegionInput, Runner, Step
from fxsplit_encoder.compile.trace import compile_graph, trace_forward

__all__ = [
    "DIRECT",
    "Bindings",
    "BoundProgram",
    "CompileOptions",
    "HostOp",
    "PaddingReport",
    "Program",
    "RegionInput",
    "Runner",
    "Step",
    "build_program",
    "compile_graph",
    "register_host_op",
    "trace_forward",
]

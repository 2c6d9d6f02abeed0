"""Dynamo: marking sizes, its errors, and what it is compiling now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch._dynamo
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.exc import (
    RestartAnalysis,
    TensorifyScalarRestartAnalysis,
    TorchDynamoException,
    UnspecializeRestartAnalysis,
)
from torch._guards import CompileContext

__all__ = [
    "RestartAnalysis",
    "TorchDynamoException",
    "TraceAgain",
    "backends_in_use",
    "current_compile_id",
    "inner_error",
    "mark_dynamic",
    "mark_static",
    "mark_unbacked",
    "maybe_mark_dynamic",
    "original_module",
    "traced_files",
]

# torch.compile's documentation tells users of these, but no public module has them. A size that may be 1 must
# be unbacked, or a trace is specialized to it.
mark_dynamic = torch._dynamo.mark_dynamic
mark_static = torch._dynamo.mark_static
maybe_mark_dynamic = torch._dynamo.maybe_mark_dynamic

current_compile_id = CompileContext.current_compile_id
"""What Dynamo compiles now, None outside of it: tells a trace from an earlier one that failed before its
backend was called, which no public API reports.
"""

# Attributes under which Dynamo's wrappers of a backend have what they wrap.
_WRAPPED = ("compiler_fn", "__wrapped__", "_torchdynamo_orig_backend")


class TraceAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """Has Dynamo trace again: a backend may raise the first, and with the second Dynamo forgets where its
    last trace went. A public API for a backend that wants another graph does not exist.
    """


def backends_in_use() -> Iterator[Any]:
    """The backend of the trace under way, and those inside of its wrappers, outermost first. Called from a
    frame that Dynamo does not trace; there is no public way to ask for whom it traces.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    while backend is not None:
        yield backend
        inner = (getattr(backend, name, None) for name in _WRAPPED)
        backend = next((each for each in inner if each is not None), None)


def inner_error(error: BaseException) -> BaseException | None:
    """What an error of Dynamo's wraps: it raises some "from None", which leaves no `__cause__`."""
    found: BaseException | None = getattr(error, "inner_exception", None)
    return found


def traced_files(error: BaseException) -> list[str]:
    """The files of the code that Dynamo was tracing when it raised an error, outermost first; none where it
    does not tell.
    """
    return [frame.filename for frame in getattr(error, "real_stack", None) or ()]


def original_module(compiled: Callable[..., Any]) -> Any:
    """The module that `torch.compile` was given; anything else is returned as it is."""
    return getattr(compiled, "_orig_mod", compiled)

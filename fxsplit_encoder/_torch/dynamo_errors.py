"""Dynamo's errors, and one that has it trace again. Importing this loads Dynamo."""

from torch._dynamo.exc import (
    RestartAnalysis,
    TensorifyScalarRestartAnalysis,
    TorchDynamoException,
    UnspecializeRestartAnalysis,
)

__all__ = ["RestartAnalysis", "TorchDynamoException", "TraceAgain"]


class TraceAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """Makes Dynamo trace again: a backend may raise the first; the second drops what the last trace left."""

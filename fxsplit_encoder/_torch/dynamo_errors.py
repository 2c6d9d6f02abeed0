"""Dynamo's errors, and one that has it trace again. Importing this loads Dynamo."""

from torch._dynamo.exc import (
    RestartAnalysis,
    TensorifyScalarRestartAnalysis,
    TorchDynamoException,
    UnspecializeRestartAnalysis,
)

__all__ = ["RestartAnalysis", "TorchDynamoException", "TraceAgain"]


class TraceAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """Has Dynamo trace again: a backend may raise the first, and with the second Dynamo forgets where its
    last trace went. A public API for a backend that wants another graph does not exist.
    """

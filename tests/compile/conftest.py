"""The small forwards of `packed_forwards` as fixtures.

They live in a module of their own: Dynamo looks up a traced function's globals by module name, and there is
more than one `conftest`.
"""

from collections.abc import Callable

import pytest
from torch import Tensor

from .packed_forwards import Trace, packed_inputs, trace_packed


@pytest.fixture(scope="session")
def trace() -> Trace:
    return trace_packed


@pytest.fixture(scope="session")
def inputs() -> Callable[[int], dict[str, Tensor]]:
    return packed_inputs

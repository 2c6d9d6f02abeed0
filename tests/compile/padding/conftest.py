import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_logs() -> Iterator[None]:
    """A trace logs more than it computes, at a level that pytest would keep."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)

"""Fixtures of the connector's tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name; pytest's are long."""
    with tempfile.TemporaryDirectory(prefix="fx") as path:
        yield Path(path)

"""Fixtures of the tests of managers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .mock_towers import assert_equal_items


@pytest.fixture(scope="session")
def assert_as_eager(tiny_towers: Any, encode: Any) -> Callable[[Any, dict[str, Any]], None]:
    """`assert_as_eager(manager, inputs)`: a manager of the tiny tower returns what an equal tower returns."""

    def check(manager: Any, inputs: dict[str, Any]) -> None:
        assert_equal_items(manager.execute(inputs), encode(tiny_towers.reference, inputs))

    return check


@pytest.fixture(scope="session")
def make_captured(make_manager: Any) -> Callable[..., Any]:
    """Managers of the tiny tower that have been captured: `make_captured(mode="full")`."""

    def make(**settings: Any) -> Any:
        manager = make_manager(**settings)
        manager.capture()
        return manager

    return make

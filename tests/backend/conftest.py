"""Fixtures of the backend's tests: a tower and its pixels, and the dispatchers that a test makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.backend import BudgetDispatcher, dispatchers
from tests.small_tower import FEATURES, SmallTower


@pytest.fixture
def small() -> SmallTower:
    """A tower of the test's own that is traced sooner."""
    return SmallTower()


@pytest.fixture
def few_pixels() -> Tensor:
    """Patches of one image of `towers.GRID` for `small`."""
    return torch.randn(24, FEATURES, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def made(fresh_dynamo: None) -> Callable[[], list[BudgetDispatcher]]:
    """`made()`: the dispatchers since the test began."""
    known = set(dispatchers())
    return lambda: [each for each in dispatchers() if each not in known]

"""What the tests of the two Kimi towers share: managers, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fxsplit_encoder as fx

from .tiny_packed import PATCH

MODES = ("auto", "full", "piecewise", "exact", "breakable", "none")
BUDGETS = (4, 16, 32)


def patches(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, PATCH, PATCH, generator=torch.Generator().manual_seed(seed))


def make_managers(wrapped: Any) -> dict[str, fx.EncoderCudaGraphManager]:
    """A captured manager in each mode; they share one trace, but `breakable` runs the untouched module."""
    managers: dict[str, fx.EncoderCudaGraphManager] = {}
    for mode in MODES:
        config = fx.EncoderConfig(
            mode=mode,
            token_budgets=BUDGETS,
            max_items_per_batch=4,
            max_frames_per_batch=8,
            exact_min_hits=1,
            debug=True,
        )
        manager = fx.EncoderCudaGraphManager(wrapped, config, log_interval=0)
        path = manager.paths["default"]
        if managers and mode != "breakable":
            path.forward.bind(next(iter(managers.values())).paths["default"].program)
        manager.capture()
        managers[mode] = manager
    return managers


def assert_same_items(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert [item.shape for item in got] == [item.shape for item in expected]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def assert_traced_once(managers: dict[str, fx.EncoderCudaGraphManager], blocks: int) -> None:
    """All managers run one program, which is cut at every block's attention."""
    bound = [manager.programs["default"] for manager in managers.values()]
    programs = {id(each.program): each.program for each in bound if each is not None}
    (program,) = programs.values()
    assert [manager.reports for manager in managers.values()] == [[]] * len(managers)
    assert len(program.pieces) == blocks + 1
    assert program.num_distinct == 3

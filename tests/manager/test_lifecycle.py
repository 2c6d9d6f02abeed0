"""What the process is like while a tower is compiled, and after."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import fxsplit_encoder as fx

from .mock_towers import SplitModel
from .start_process import CONFIG


def test_compiling_collects_among_what_it_made_alone() -> None:
    frozen = []

    def compiled(module: Any, inputs: Any) -> Callable[..., Any]:
        frozen.append(gc.get_freeze_count())
        return module.forward  # type: ignore[no-any-return]

    before = gc.get_freeze_count()
    fx.EncoderCudaGraphManager(SplitModel(), CONFIG.replace(piece_compiler=compiled)).compile()
    assert frozen and all(frozen)
    assert gc.get_freeze_count() == before

"""What a call behind torch.compile costs Python beyond its replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxsplit_encoder.compile.derived import DerivedParameters

from ..instructions import instructions
from ..small_tower import SmallAdapter

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@torch.no_grad()
def test_a_call_takes_few_instructions_and_asks_dynamo_nothing(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo once set out to trace the frame around the forward at every call, at three times as many."""
    torch.manual_seed(0)
    options = {"token_budgets": [4, 8], "mode": "full"}
    compiled = torch.compile(SmallAdapter(), backend="encoder_cg", fullgraph=True, options=options)
    asked = []
    wrapper = torch._dynamo.convert_frame.CatchErrorsWrapper
    ask = wrapper.__call__

    def remember(self: Any, frame: Any, *args: Any) -> Any:
        asked.append(frame.f_code.co_name)
        return ask(self, frame, *args)

    monkeypatch.setattr(wrapper, "__call__", remember)
    patches, grids = torch.randn(16, compiled.patch_features), torch.tensor([[1, 4, 4]])
    compiled(patches, grids)
    assert asked.count("forward") == 1
    assert "__call__" not in asked
    asked.clear()
    for images in (1, 2, 1):
        compiled(patches.repeat(images, 1), grids.repeat(images, 1))
    assert asked == []
    monkeypatch.setattr(wrapper, "__call__", ask)
    (dispatcher,) = made()
    for program in dispatcher.programs.values():
        for captured in program.captured.values():
            captured.capture.segments[:] = []
    refreshed = []
    refresh = DerivedParameters.refresh
    monkeypatch.setattr(DerivedParameters, "refresh", lambda *args: refreshed.append(1) or refresh(*args))
    assert instructions(lambda: compiled(patches, grids)) < 6000
    assert len(refreshed) <= 1
    assert dispatcher.hits == 5

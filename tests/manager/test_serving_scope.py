"""What surrounds a request is there inside of it, and gone afterwards, whatever happens."""

from __future__ import annotations

import pytest
import torch

from fxsplit_encoder.manager import lifecycle as module
from fxsplit_encoder.manager.lifecycle import serving_scope
from fxsplit_encoder.manager.turns import Turns
from fxsplit_encoder.runtime import Choosers


def test_it_is_all_four_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, kernels = Turns(), Choosers()
    before = [chooser.current.get(None) for chooser in kernels.all]
    with pytest.raises(KeyError), torch.inference_mode():
        with serving_scope(turns, kernels, torch.device("cpu")):
            assert turns._owner is not None
            assert [chooser.current.get(None) for chooser in kernels.all] == list(kernels.all)
            assert not torch.is_inference_mode_enabled()
            with serving_scope(turns, kernels, torch.device("cpu")):
                pass
            assert turns._owner is not None
            raise KeyError
    assert turns._owner is None
    assert [chooser.current.get(None) for chooser in kernels.all] == before


def test_a_device_that_cannot_be_entered_gives_the_turn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(device: torch.device) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(module, "on_device", gone)
    turns, kernels = Turns(), Choosers()
    with pytest.raises(RuntimeError, match="no such device"):
        with serving_scope(turns, kernels, torch.device("cpu")):
            raise AssertionError
    assert turns._owner is None
    assert torch.is_grad_enabled()

"""The device of a command."""

from __future__ import annotations

import pytest
import torch

from fxsplit_encoder.cli.console import choose_device
from fxsplit_encoder.errors import InputError


def test_a_numbered_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cpu", "cuda", "auto"):
        choose_device(name)
    assert current == []
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]
    with pytest.raises(InputError, match="this machine has 2 CUDA devices"):
        choose_device("cuda:2")
    assert len(current) == 1

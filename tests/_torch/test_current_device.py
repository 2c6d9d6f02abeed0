"""Whatever launches without saying where does so on the device of its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder._torch import device as devices
from fxsplit_encoder._torch.device import indexed, on_device


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that became the current one, of a machine whose current one is cuda:0."""
    devices: list[torch.device] = []

    @contextlib.contextmanager
    def device(which: torch.device) -> Iterator[None]:
        devices.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    return devices


def test_only_another_gpu_becomes_the_current_device(entered: list[torch.device]) -> None:
    for name in ("cpu", "cuda", "cuda:0"):
        with on_device(torch.device(name)):
            pass
    assert entered == []
    with on_device(torch.device("cuda:1")):
        assert entered == [torch.device("cuda:1")]


def test_a_gpu_without_a_number_is_the_current_one(entered: list[torch.device]) -> None:
    assert indexed(torch.device("cuda")) == torch.device("cuda:0")
    for name in ("cpu", "cuda:1"):
        assert indexed(torch.device(name)) == torch.device(name)


def test_a_manager_works_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from ..manager.mock_towers import SplitModel, batch

    asked: list[torch.device] = []

    def noted(device: torch.device) -> contextlib.AbstractContextManager[object]:
        asked.append(device)
        return devices.ALREADY

    for module in ("lifecycle", "background"):
        monkeypatch.setattr(f"fxsplit_encoder.manager.{module}.on_device", noted)
    manager = fx.EncoderCudaGraphManager(SplitModel(), fx.EncoderConfig(token_budgets=(8,)), log_interval=0)  # type: ignore[arg-type]
    for call in (manager.compile, manager.capture, lambda: manager.execute(batch(3))):
        asked.clear()
        call()
        assert asked
        assert set(asked) == {manager.device}

"""The current device, the default device, and a delay on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

ALREADY = contextlib.nullcontext()
"""The result of `on_device` for the current device."""


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU current if it is not, for kernels of Triton, events and the current stream."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return ALREADY
    return torch.cuda.device(device)


def indexed(device: torch.device) -> torch.device:
    """Returns a device with its index: "cuda" is the current one now, and stays that."""
    index: int | None = device.index
    if device.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextlib.contextmanager
def no_default_device() -> Iterator[None]:
    """Suspends the default device, whose mode makes Dynamo fail at tensor methods written in Python."""
    modes = _get_current_function_mode_stack()
    others = [mode for mode in modes if not isinstance(mode, DeviceContext)]
    _replace_modes(modes, others)
    try:
        yield
    finally:
        _replace_modes(others, modes)


def _replace_modes(modes: list[TorchFunctionMode], others: list[TorchFunctionMode]) -> None:
    if modes != others:
        for _ in modes:
            _pop_mode()
        for mode in others:
            _push_mode(mode)


# Cycles of a microsecond; GPUs that run slower wait longer.
_CYCLES = 2000

# Beyond this the host is taken to be busy with something else.
_LONGEST_S = 0.02


def wait_on_device(seconds: float) -> None:
    """Enqueues a kernel that runs for about so many seconds, 20 ms at most."""
    torch.cuda._sleep(int(min(seconds, _LONGEST_S) * 1e6 * _CYCLES))

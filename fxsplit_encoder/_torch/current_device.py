"""The device of launches and of new tensors where nothing says which: this thread's current, and default."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

ALREADY = contextlib.nullcontext()
"""What `on_device` gives where there is nothing to do."""


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one, if it is a GPU and is not.

    torch's own operators find their device by their tensors. Triton's and other packages' kernels, events and
    the current stream do not: on another device they fail, or time and order what is not there.
    """
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return ALREADY
    return torch.cuda.device(device)


def indexed(device: torch.device) -> torch.device:
    """The device as tensors on it name theirs: "cuda" is the current one now, and stays that."""
    index: int | None = device.index
    if device.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextlib.contextmanager
def no_default_device() -> Iterator[None]:
    """Suspends the default device, whose mode makes Dynamo fail at tensor methods written in Python."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    others = [mode for mode in modes if not isinstance(mode, DeviceContext)]
    _replace_modes(modes, others)
    try:
        yield
    finally:
        _replace_modes(others, modes)


def _replace_modes(modes: list[TorchFunctionMode], others: list[TorchFunctionMode]) -> None:
    if modes != others:
        for _ in modes:
            _pop_mode()  # type: ignore[no-untyped-call]
        for mode in others:
            _push_mode(mode)  # type: ignore[no-untyped-call]

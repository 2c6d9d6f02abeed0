"""The current device, a delay on it, and sibling streams, which a CUDA graph captures as branches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

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


# Cycles of a microsecond; GPUs that run slower wait longer.
_CYCLES = 2000

# Beyond this the host is taken to be busy with something else.
_LONGEST_S = 0.02


def wait_on_device(seconds: float) -> None:
    """Enqueues a kernel that runs for about so many seconds, 20 ms at most."""
    torch.cuda._sleep(int(min(seconds, _LONGEST_S) * 1e6 * _CYCLES))  # type: ignore[no-untyped-call]


class Branch:
    """A sibling of the current stream for a `purpose`; without CUDA there is none. The caller of `fork` keeps
    what the sibling reads and writes allocated until `join`: the allocator would reuse it on the main stream.
    """

    def __init__(self, device: torch.device, purpose: str) -> None:
        self._main: Any = None
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._sibling = _sibling(device, self._main.cuda_stream, self._main.priority, purpose)

    def fork(self) -> None:
        """Makes the sibling wait for its stream."""
        if self._main is not None:
            self._sibling.wait_stream(self._main)

    def join(self) -> None:
        """Makes the stream wait for its sibling."""
        if self._main is not None:
            self._main.wait_stream(self._sibling)

    def __enter__(self) -> None:
        """Makes the sibling the current stream."""
        if self._main is not None:
            self._entered = torch.cuda.stream(self._sibling)
            self._entered.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._main is not None:
            self._entered.__exit__(kind, error, traceback)


@functools.cache
def _sibling(device: torch.device, main: int, priority: int, purpose: str) -> torch.cuda.Stream:
    """A stream with the priority of stream `main`, but another one: torch may hand out `main` itself."""
    while (stream := torch.cuda.Stream(device, priority)).cuda_stream == main:  # type: ignore[no-untyped-call]
        pass
    return stream

"""Host buffers, copies into them that do not wait for the device, and events that tell their ends."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.connector.books.tickets import Event


class Copies:
    """Copies as the device in question makes them; without CUDA the calling thread does, at once. Nothing
    else in the connector knows of devices.
    """

    def __init__(self) -> None:
        self._stream: Callable[[torch.device], Any] = functools.cache(torch.cuda.Stream)
        """Side streams, so that the next batch runs while rows are copied."""

    def allocate(self, num_bytes: int) -> Tensor:
        """A host buffer of so many bytes, pinned where there is CUDA."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())

    def give_back(self) -> None:
        """Hands pinned buffers that were let go of back to the system, where torch can."""
        empty = getattr(torch.accelerator, "empty_host_cache", None)  # from torch 2.12 on
        if torch.cuda.is_available() and empty is not None:
            empty()

    def to_host(self, rows: Tensor, buffer: Tensor) -> tuple[Tensor, Event]:
        """Start a copy; the same rows in the buffer, and when they are there."""
        target = buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
        if not rows.is_cuda:
            target.copy_(rows)
            return target, Event()
        stream = self._stream(rows.device)
        stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(stream):
            target.copy_(rows, non_blocking=True)
            return target, self.mark(rows.device)

    @contextlib.contextmanager
    def own_stream(self, device: torch.device | str | None, priority: int = 0) -> Iterator[None]:
        """Give this thread's work on a device with streams one of its own: no work of others waits for it."""
        if device is None or (device := torch.device(device)).type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(device, priority)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(device).wait_stream(stream)

    def mark(self, device: torch.device) -> Event:
        """When everything is over that this thread has given the current stream of a device."""
        if device.type != "cuda":
            return Event()
        event: Any = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        return event  # type: ignore[no-any-return]

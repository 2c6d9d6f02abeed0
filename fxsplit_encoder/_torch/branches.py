"""Work beside that of the current stream: inside the capture of a CUDA graph, a branch of the graph."""

from __future__ import annotations

import functools
from types import TracebackType
from typing import Any

import torch


class Branch:
    """The sibling of the stream that is current where this is made.

    Every stream has a sibling of its own for each `purpose`: two threads that capture at once do it on
    different streams, and what captures on one stream shares the workspaces that libraries keep for its
    sibling. Without CUDA there is none, and work runs where it stands.

    Of the memory, whoever forks sees to it that what the sibling reads and writes stays allocated until
    `join`: an allocator gives what is freed to the next one who asks on the same stream, whether or not a
    sibling still reads it. What the sibling itself allocates may be read after `join`, and goes back to the
    sibling, which waits at its next `fork`.
    """

    def __init__(self, device: torch.device, purpose: str) -> None:
        self._main: Any = None
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._sibling = _sibling(device, self._main.cuda_stream, self._main.priority, purpose)

    def fork(self) -> None:
        """What the sibling gets from now on runs after what its stream holds already."""
        if self._main is not None:
            self._sibling.wait_stream(self._main)

    def join(self) -> None:
        """What the stream gets from now on runs after what its sibling holds already."""
        if self._main is not None:
            self._main.wait_stream(self._sibling)

    def __enter__(self) -> None:
        """Inside, the sibling is the current stream."""
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
    """A stream with the priority of stream `main`, but not that one, which torch may hand out."""
    while (stream := torch.cuda.Stream(device, priority)).cuda_stream == main:  # type: ignore[no-untyped-call]
        pass
    return stream

"""Streams to capture on, their cuBLAS workspaces, and siblings, which a CUDA graph captures as branches."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any

import torch

from fxsplit_encoder._torch.allocator import memory_pool

_NON_BLOCKING = 1
"""`CU_STREAM_NON_BLOCKING`: the stream does not wait for the default stream."""


class _CaptureStream(torch.cuda.ExternalStream):
    """A stream that may be taken again when this object is gone."""

    # Not a weak reference's callback: torch 2.11 crashes where streams have weak references.

    unused: list[int]

    def __del__(self) -> None:
        self.unused.append(self.cuda_stream)


class CaptureStreams:
    """Creates the streams of one GPU that CUDA graphs are captured on, and their cuBLAS workspaces.

    A graph reads and writes the workspaces (cuBLAS's and cuBLASLt's) that its stream had at the capture.
    torch hands out 32 streams in turn, so other code would share a stream and its workspace, and it frees the
    workspaces of all streams on request or when other code captures, as `torch.compile` with
    `mode="reduce-overhead"` does. These streams are made by CUDA for this package alone, and their workspaces
    lie in a pool that is never returned, so that no later allocation gets memory that a graph still writes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unused: dict[int, list[int]] = {}
        self._siblings: dict[tuple[int, str], torch.cuda.Stream] = {}
        self._memory = memory_pool(device)

    def take(self, priority: int = 0) -> torch.cuda.Stream:
        """Returns a stream for one user, which the next user gets once this object is collected: a workspace,
        32 MiB on Hopper, stays with its stream.
        """
        unused = self._unused.setdefault(priority, [])
        try:
            pointer = unused.pop()
        except IndexError:
            pointer = self._create(priority)
        stream = _CaptureStream(pointer, self._device)  # type: ignore[no-untyped-call]
        stream.unused = unused
        return stream

    def _create(self, priority: int) -> int:
        made = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            torch.cuda.mem_get_info()  # binds the device's context to this thread, as the driver needs
            cuda = ctypes.CDLL("libcuda.so.1")
            code = cuda.cuStreamCreateWithPriority(ctypes.byref(made), _NON_BLOCKING, priority)
        if code:
            raise RuntimeError(f"cuStreamCreateWithPriority failed with error {code} on {self._device}")
        assert made.value is not None
        return made.value

    def sibling(self, main: torch.cuda.Stream, purpose: str) -> torch.cuda.Stream:
        """Returns the side stream that `main` uses for one purpose, of the same priority."""
        key = (main.cuda_stream, purpose)
        if key not in self._siblings:
            self._siblings[key] = self.take(main.priority)
            self._reserve(self._siblings[key])
        return self._siblings[key]

    def reserve_workspaces(self, main: torch.cuda.Stream) -> None:
        """Allocates what this thread lacks of the workspaces of a stream and its siblings."""
        siblings = [stream for (beside, _), stream in self._siblings.items() if beside == main.cuda_stream]
        for stream in (main, *siblings):
            self._reserve(stream)

    def _reserve(self, stream: torch.cuda.Stream) -> None:
        if torch.cuda.is_current_stream_capturing():  # the graph's own memory is as safe
            return
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(self._memory, self._device):
            # Made here: streams may be taken under a mode of fake tensors.
            factors = torch.zeros(8, 8, dtype=torch.float32, device=self._device)
            torch.mm(factors, factors)  # by cuBLAS
            torch.addmm(factors[0], factors, factors)  # by cuBLASLt


@functools.cache
def capture_streams(device: torch.device) -> CaptureStreams:
    """Returns the streams of a GPU, whose index is given."""
    return CaptureStreams(device)


class Branch:
    """A sibling of the current stream for a `purpose`; without CUDA there is none. The caller of `fork` keeps
    what the sibling reads and writes allocated until `join`: the allocator would reuse it on the main stream.
    """

    def __init__(self, device: torch.device, purpose: str) -> None:
        self._main: Any = None
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._sibling = capture_streams(self._main.device).sibling(self._main, purpose)

    def fork(self) -> None:
        """Makes the sibling wait for its stream."""
        if self._main is not None:
            self._sibling.wait_stream(self._main)

    def join(self) -> None:
        """Makes the stream wait for its sibling."""
        if self._main is not None:
            self._main.wait_stream(self._sibling)

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Makes the sibling the current stream inside."""
        return contextlib.nullcontext() if self._main is None else torch.cuda.stream(self._sibling)

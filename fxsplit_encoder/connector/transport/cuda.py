"""Tensors from one GPU to another of the same host, or between two processes on one, past the host's memory.

The owner puts tensors into a memory of its own on its GPU, which the other process opens once. Streams are
ordered by events: each block has one, recorded behind what filled it. A reader asks for it again and again
before its stream waits for it: the event of a process that was killed never passes, and a stream that waits
for it is lost. A reader's copies are over before it says that a block is released, so the owner may fill it
again at once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from fxsplit_encoder._torch import cuda_ipc
from fxsplit_encoder.connector.transport.held_blocks import Block, HeldBlocks
from fxsplit_encoder.connector.transport.layout import ALIGNMENT, check_layouts, copy_out, lay_out
from fxsplit_encoder.connector.transport.plain import from_plain, to_plain
from fxsplit_encoder.connector.transport.seam import Handle, Payload
from fxsplit_encoder.connector.transport.shared_memory import SharedMemoryTransport
from fxsplit_encoder.connector.transport.wire import Message
from fxsplit_encoder.errors import InputError, TransportError

_POLL_SECONDS = 50e-6


class DeviceMemory(Message, frozen=True):
    """What the other end needs to read from a GPU's memory."""

    owner: str
    num_bytes: int
    uuid: str
    """Of the GPU: its number may be another in another process."""
    share: cuda_ipc.Share


class DeviceEvent(Protocol):
    """A point in a stream's work, known to two processes."""

    def record(self) -> None:
        """Move it behind what was asked of the current stream."""
        ...

    def ipc_handle(self) -> bytes:
        """What the other process opens it with."""
        ...

    def query(self) -> bool:
        """Whether it has passed."""
        ...

    def wait(self) -> None:
        """Let the current stream wait for it."""
        ...

    def synchronize(self) -> None:
        """Wait for it here."""
        ...


class Devices(Protocol):
    """What a transport asks of the GPUs; tests have another."""

    def share(self, memory: Tensor) -> cuda_ipc.Share:
        """See `cuda_ipc.share`."""
        ...

    def open(self, values: cuda_ipc.Share, device: torch.device) -> Tensor:
        """See `cuda_ipc.open_shared`."""
        ...

    def uuid(self, device: torch.device) -> str:
        """The GPU's own name."""
        ...

    def named(self, uuid: str) -> torch.device | None:
        """The GPU of a name, if this process sees it."""
        ...

    def new_event(self, device: torch.device) -> DeviceEvent:
        """An event that another process may open."""
        ...

    def open_event(self, handle: bytes, device: torch.device) -> DeviceEvent:
        """Another process's event."""
        ...


class CudaDevices:
    """`Devices` of CUDA."""

    share = staticmethod(cuda_ipc.share)
    open = staticmethod(cuda_ipc.open_shared)

    def uuid(self, device: torch.device) -> str:
        """The GPU's own name."""
        return str(torch.cuda.get_device_properties(device).uuid)

    def named(self, uuid: str) -> torch.device | None:
        """The GPU of a name, if this process sees it."""
        devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
        return next((device for device in devices if self.uuid(device) == uuid), None)

    def new_event(self, device: torch.device) -> DeviceEvent:
        """An event that another process may open."""
        with torch.cuda.device(device):
            return torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]

    def open_event(self, handle: bytes, device: torch.device) -> DeviceEvent:
        """Another process's event."""
        return torch.cuda.Event.from_ipc_handle(device, handle)  # type: ignore[no-any-return,no-untyped-call]


class CudaTransport:
    """A `Transport` over GPU memory, beside a connected one over the host's, which carries its words.

    Args:
        host: connected to the process that is to read, or to be read from.
        max_bytes: of the memory to put into; 0: there is none, and this end reads only.
        device: where this memory is.
        devices: another than CUDA's are for tests.

    Raises:
        InputError: the device has no such memory.
    """

    def __init__(
        self,
        host: SharedMemoryTransport,
        max_bytes: int = 0,
        device: torch.device | None = None,
        devices: Devices | None = None,
    ) -> None:
        self.owner = secrets.token_hex(8)
        self._host = host
        self._devices = devices if devices is not None else CudaDevices()
        self._memory: Tensor | None = None
        if max_bytes:
            self._memory = _allocate(max_bytes, device)
        self._blocks = HeldBlocks(max_bytes, self._clear)
        self._events: dict[int, DeviceEvent] = {}
        self._free_events: list[DeviceEvent] = []
        self._peer: DeviceMemory | None = None
        self._peer_memory: Tensor | None = None
        self._peer_events: dict[bytes, DeviceEvent] = {}
        host.route(self.owner, self._blocks.give_back)

    @property
    def held_bytes(self) -> int:
        """Bytes of this end's memory that are not released, padding included."""
        return self._blocks.held_bytes

    @property
    def may_put(self) -> bool:
        """Whether this end has a memory to put into."""
        return self._memory is not None

    def knows(self, handle: Handle) -> bool:
        """Whether a handle is of this transport's memory, or of the other end's."""
        return handle.owner == self.owner or (self._peer is not None and handle.owner == self._peer.owner)

    # --- the two ends

    def describe(self) -> DeviceMemory:
        """What the other end adopts, once."""
        memory = self._own_memory()
        uuid = self._devices.uuid(memory.device)
        return DeviceMemory(self.owner, memory.numel(), uuid, self._devices.share(memory))

    def adopt(self, described: DeviceMemory) -> None:
        """Open the other end's memory.

        Raises:
            TransportError: this process does not see that GPU, or cannot open its memory.
        """
        assert self._peer is None, "adopted already"
        device = self._devices.named(described.uuid)
        if device is None:
            raise TransportError(
                f"the GPU {described.uuid} of the other process is not visible to this one; make it so "
                "(CUDA_VISIBLE_DEVICES), or hand features over through the host"
            )
        try:
            memory = self._devices.open(described.share, device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise TransportError(f"GPU memory of the other process cannot be opened: {error}") from error
        if memory.numel() != described.num_bytes:
            raise TransportError(f"expected {described.num_bytes} bytes of GPU memory; got {memory.numel()}")
        self._peer, self._peer_memory = described, memory

    def _own_memory(self) -> Tensor:
        if self._memory is None:
            raise TransportError("the transport is closed, or has no memory to put into")
        return self._memory

    # --- putting

    def put(
        self,
        key: bytes,
        buffers: Mapping[str, Tensor],
        meta: Mapping[str, object] | None = None,
        timeout: float = 0.0,
    ) -> Handle:
        """Copy tensors into this end's memory, on the current stream; see `Transport.put`.

        Args:
            key: what they are.
            buffers: by name, on any device.
            meta: what travels with them.
            timeout: seconds to wait for room.
        """
        layouts, num_bytes = lay_out(buffers)
        plain = to_plain(meta or {})
        memory = self._own_memory()
        block = self._blocks.take(max(num_bytes, ALIGNMENT), timeout)
        try:
            part = memory[block.offset : block.offset + num_bytes]
            event = self._free_events.pop() if self._free_events else self._devices.new_event(memory.device)
            self._events[block.number] = event
            with torch.no_grad(), _current(memory):
                for layout in layouts:
                    layout.view(part).copy_(buffers[layout.name], non_blocking=True)
                event.record()
            handle = event.ipc_handle()
        except BaseException:
            self._blocks.give_back(block.number)
            raise
        return Handle(self.owner, block.number, bytes(key), block.offset, layouts, plain, event=handle)

    def _clear(self, block: Block) -> None:
        event = self._events.pop(block.number, None)
        if event is not None:
            event.synchronize()  # released before it was filled: another stream must not fill it meanwhile
            self._free_events.append(event)

    # --- getting

    @property
    def peer_device(self) -> torch.device | None:
        """The GPU of the other end's memory; None: it has not told of any."""
        return self._peer_memory.device if self._peer_memory is not None else None

    def get(self, handle: Handle, into: Mapping[str, Tensor] | None = None) -> Payload:
        """Copies of a handle's tensors, from either end, on the current stream; see `Transport.get`.

        They are complete when this returns, so that the handle may be released.
        """
        memory, event = self._memory_of(handle), self._event_of(handle)
        check_layouts(handle.tensors, 0, memory.numel() - handle.offset)
        part = memory[handle.offset :]
        with _current(memory):
            self._wait_for(event)
            event.wait()
            copies = copy_out({layout.name: layout.view(part) for layout in handle.tensors}, into)
            done = self._devices.new_event(memory.device)
            done.record()
            done.synchronize()
        return Payload(copies, from_plain(handle.meta))

    def _wait_for(self, event: DeviceEvent) -> None:
        """Until an event has passed, or its process cannot let it pass any more."""
        while not event.query():
            if not self._host.is_open:
                raise TransportError("the other process ended before what it put was computed")
            time.sleep(_POLL_SECONDS)

    def _memory_of(self, handle: Handle) -> Tensor:
        if handle.owner == self.owner:
            if self._blocks.find(handle.number) is None:
                raise TransportError(f"nothing is held under handle {handle.number}: it was released")
            memory = self._own_memory()
        elif self._peer is not None and self._peer_memory is not None and handle.owner == self._peer.owner:
            memory = self._peer_memory
        else:
            raise TransportError(f"no transport {handle.owner} at the other end of this one")
        if not 0 <= handle.offset <= memory.numel():
            raise TransportError(f"handle {handle.number} begins at {handle.offset}, outside its memory")
        return memory

    def _event_of(self, handle: Handle) -> DeviceEvent:
        """Its own, or the other end's: opened once for each that there is, since they are used again."""
        if handle.owner == self.owner:
            return self._events[handle.number]
        event = self._peer_events.get(handle.event)
        if event is None:
            assert self._peer_memory is not None
            try:
                event = self._devices.open_event(handle.event, self._peer_memory.device)
            except RuntimeError as error:
                raise TransportError(f"an event of the other process cannot be opened: {error}") from error
            self._peer_events[handle.event] = event
        return event

    def release(self, handle: Handle) -> None:
        """Give up a handle of either end; see `Transport.release`."""
        if handle.owner == self.owner:
            self._blocks.give_back(handle.number)
        elif self._peer is not None and handle.owner == self._peer.owner:
            self._host.tell_released(handle)

    def close(self) -> None:
        """Give up both memories; idempotent. The host's transport stays open."""
        self._blocks.close()
        for event in self._events.values():
            event.synchronize()  # the memory is another's next
        self._events.clear()
        self._memory = self._peer_memory = self._peer = None
        self._free_events.clear()
        self._peer_events.clear()


def _current(memory: Tensor) -> AbstractContextManager[Any]:
    """The memory's GPU as the current one, whose current stream events and copies go to."""
    context: AbstractContextManager[Any] = torch.cuda.device_of(memory)  # type: ignore[no-untyped-call]
    return context


def _allocate(num_bytes: int, device: torch.device | None) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device_bytes: cannot allocate {num_bytes} bytes on {device}: {error}") from error

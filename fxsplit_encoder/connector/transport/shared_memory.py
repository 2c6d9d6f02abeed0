"""Tensors from one process to another of the same host, through memory that both have mapped.

Each end makes one memory of its own, as large as its bound, and hands its descriptor to the other when they
connect. What is put is copied into the owner's memory; what is got is copied out of it.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fxsplit_encoder.connector.transport.arena import BlockReader, OwnArena, adopt, digest, write_stamp
from fxsplit_encoder.connector.transport.blocks import Block, HeldBlocks
from fxsplit_encoder.connector.transport.layout import ALIGNMENT, Handle, Payload, lay_out, to_plain
from fxsplit_encoder.connector.transport.wire import Greeting, Peer, close_all
from fxsplit_encoder.errors import TransportError

DEFAULT_MAX_BYTES = 1 << 30
DEFAULT_KEPT_BYTES = 64 << 20


def _nothing() -> None: ...


class SharedMemoryTransport:
    """One end of a connection of two processes. Threads may share it.

    Its memory has a bound that is never exceeded. What is put is held until it is released, by whoever put it
    or whoever got it, and no longer than until `close`.

    Args:
        max_bytes: of this end's memory. It takes memory only where it was written.
        kept_bytes: how much of it stays resident once it is free, for the next that is put.
        checksums: put a checksum (blake3) into every handle. Readers check those that have one.
        on_hang_up: called once, on a thread of the transport's, when the other end is gone.
    """

    def __init__(
        self,
        max_bytes: int = DEFAULT_MAX_BYTES,
        *,
        kept_bytes: int = DEFAULT_KEPT_BYTES,
        checksums: bool = False,
        on_hang_up: Callable[[], None] = _nothing,
    ) -> None:
        if checksums:
            digest(torch.empty(0, dtype=torch.uint8, device="cpu"))  # what is missing is said at once
        self.owner = secrets.token_hex(8)
        self.checksums = checksums
        self._kept_bytes = kept_bytes
        self._on_hang_up = on_hang_up
        self._arena = OwnArena(max_bytes)
        self._blocks = HeldBlocks(self._arena.num_bytes, self._clear)
        self._peer: Peer | None = None
        self._own_blocks = BlockReader(self.owner, self._arena)
        self._peer_blocks: BlockReader | None = None

    @property
    def max_bytes(self) -> int:
        """Bytes of this end's memory."""
        return self._arena.num_bytes

    @property
    def peer_owner(self) -> str:
        """The other end's `owner`; "" before the two are connected."""
        return self._peer_blocks.owner if self._peer_blocks is not None else ""

    @property
    def held_bytes(self) -> int:
        """Bytes of this end's memory that are not released, padding included."""
        return self._blocks.held_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of this end's memory that take memory of the host."""
        return self._arena.resident_bytes

    def connect(self, connection: socket.socket, timeout: float) -> None:
        """Exchange memories with a transport at the other end; once.

        Args:
            connection: one of `connected_sockets`. It belongs to the transport from now on.
            timeout: seconds that the other end may take.

        Raises:
            TransportError: the other end is gone, is late, or offers what is no shared memory.
        """
        assert self._peer is None, "connected already"
        peer = Peer(connection, self._on_released, self._on_hang_up)
        self._peer = peer
        message, descriptors = peer.greet(*self.greeting(), timeout)
        if not isinstance(message, Greeting) or len(descriptors) != 1:
            close_all(descriptors)
            raise TransportError(f"expected a greeting with a descriptor; got {type(message).__name__}")
        self._peer_blocks = BlockReader(message.owner, adopt(descriptors[0], message.num_bytes))

    def greeting(self) -> tuple[Greeting, list[int]]:
        """What another process maps this end's memory with: a first packet, and its descriptors."""
        return Greeting(self.owner, self._arena.num_bytes), [self._arena.descriptor]

    def _on_released(self, owner: str, numbers: Sequence[int]) -> None:
        if owner == self.owner:
            for number in numbers:
                self._blocks.give_back(number)

    # --- putting

    @staticmethod
    def size_of(buffers: Mapping[str, Tensor]) -> int:
        """Bytes that `put` takes for some tensors, with what it adds to them.

        Raises:
            InputError: one cannot be put.
        """
        return lay_out(buffers, ALIGNMENT)[1]

    def put(
        self,
        key: bytes,
        buffers: Mapping[str, Tensor],
        meta: Mapping[str, object] | None = None,
        timeout: float = 0.0,
    ) -> Handle:
        """Copy tensors into this end's memory.

        Args:
            key: what they are, for messages.
            buffers: by name; of any shape, strides and device.
            meta: what travels with them; see `to_plain`.
            timeout: seconds to wait for room.

        Raises:
            InputError: they can never be held, for their kind or their size.
            TransportFullError: there is no room for them.
            TransportError: the transport is closed.
        """
        layouts, num_bytes = lay_out(buffers, ALIGNMENT)
        plain = to_plain(meta or {})
        block = self._blocks.take(num_bytes, timeout)
        try:
            memory = self._arena.view(block.offset, num_bytes)
            with torch.no_grad():
                for layout in layouts:
                    layout.view(memory).copy_(buffers[layout.name])
            checksum = digest(memory[ALIGNMENT:]) if self.checksums else b""
            write_stamp(memory, block.number, num_bytes)
        except BaseException:
            self._blocks.give_back(block.number)
            raise
        return Handle(self.owner, block.number, bytes(key), block.offset, layouts, plain, checksum)

    def _clear(self, block: Block) -> None:
        try:
            write_stamp(self._arena.view(block.offset, ALIGNMENT), 0, 0)
            # What lies below is reused first, so its pages stay; what only a peak needed is given back.
            start = max(block.offset, self._kept_bytes)
            self._arena.drop_pages(start, block.offset + block.num_bytes - start)
        except TransportError:
            pass  # closed meanwhile: the memory goes as a whole

    # --- getting

    def get(self, handle: Handle, into: Mapping[str, Tensor] | None = None) -> Payload:
        """Copies of a handle's tensors, from either end, that outlive the handle.

        Args:
            handle: from `put`, here or at the other end.
            into: tensors of the same names, shapes and dtypes to fill; None: new ones.

        Raises:
            InputError: `into` does not fit; nothing was copied.
            TransportError: nothing is held under the handle.
        """
        return self._reader_of(handle).get(handle, into)

    def view(self, handle: Handle) -> Payload:
        """A handle's tensors where they lie: valid until it is released, and to be written by nobody.

        Raises:
            TransportError: nothing is held under the handle.
        """
        return self._reader_of(handle).view(handle)

    def _reader_of(self, handle: Handle) -> BlockReader:
        if handle.owner == self.owner:
            return self._own_blocks
        if self._peer_blocks is None or handle.owner != self._peer_blocks.owner:
            raise TransportError(f"no transport {handle.owner} at the other end of this one")
        return self._peer_blocks

    def release(self, handle: Handle) -> None:
        """Give up a handle of either end; a second time, and after `close`, it does nothing."""
        if handle.owner == self.owner:
            self._blocks.give_back(handle.number)
        elif self._peer is not None and handle.owner == self.peer_owner:
            self._peer.tell_released(handle.owner, [handle.number])

    def audit(self) -> None:
        """Asserts that the blocks of this end are consistent."""
        self._blocks.audit()

    def refuse(self) -> None:
        """Release everything of this end, and take nothing more; what the other end put can still be got."""
        self._blocks.close()

    def close(self) -> None:
        """Hang up and give back both memories. What the other end has mapped stays readable there."""
        self.refuse()
        if self._peer is not None:
            self._peer.close()
        self._arena.close()
        if self._peer_blocks is not None:
            self._peer_blocks.close()

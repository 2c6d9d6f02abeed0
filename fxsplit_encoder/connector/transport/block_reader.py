"""Reading what lies in a mapped memory, one's own or another process's.

Each block begins with its number and its size, so that a handle that is out of date is noticed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from fxsplit_encoder.connector.transport.arena import Arena
from fxsplit_encoder.connector.transport.layout import ALIGNMENT, check_layouts, copy_out
from fxsplit_encoder.connector.transport.plain import from_plain
from fxsplit_encoder.connector.transport.seam import Handle, Payload
from fxsplit_encoder.errors import MissingExtraError, TransportError

_STAMP = struct.Struct("<QQ")


class BlockReader:
    """The blocks of one memory.

    Args:
        owner: as its handles name it.
        arena: the memory.
    """

    def __init__(self, owner: str, arena: Arena) -> None:
        self.owner = owner
        self._arena = arena

    def get(self, handle: Handle, into: Mapping[str, Tensor] | None = None) -> Payload:
        """Copies of a handle's tensors; see `Transport.get`."""
        copies = copy_out(self._views(handle), into)
        self._check_stamp(handle)  # it may have been released meanwhile, against the rules
        return Payload(copies, from_plain(handle.meta))

    def view(self, handle: Handle) -> Payload:
        """A handle's tensors where they lie: valid until it is released, and to be written by nobody.

        Raises:
            TransportError: nothing is held under the handle.
        """
        return Payload(self._views(handle), from_plain(handle.meta))

    def _views(self, handle: Handle) -> dict[str, Tensor]:
        memory = self._check_stamp(handle)
        check_layouts(handle.tensors, ALIGNMENT, memory.numel())
        if handle.checksum and digest(memory[ALIGNMENT:]) != handle.checksum:
            raise TransportError(f"the bytes of handle {handle.number} are not those that were put")
        return {layout.name: layout.view(memory) for layout in handle.tensors}

    def _check_stamp(self, handle: Handle) -> Tensor:
        """The bytes of a handle's block, if it is held."""
        most = self._arena.num_bytes
        if handle.offset < 0 or handle.offset % ALIGNMENT or handle.offset + ALIGNMENT > most:
            raise TransportError(f"handle {handle.number} begins at {handle.offset}, outside its memory")
        stamp = self._arena.view(handle.offset, _STAMP.size).numpy().tobytes()
        number, num_bytes = _STAMP.unpack(stamp)
        if number != handle.number or handle.number == 0:
            raise TransportError(f"nothing is held under handle {handle.number}: it was released")
        if num_bytes < ALIGNMENT or handle.offset + num_bytes > most:
            raise TransportError(f"handle {handle.number} does not lie in its memory")
        return self._arena.view(handle.offset, num_bytes)

    def close(self) -> None:
        """Unmap the memory with its last view."""
        self._arena.close()


def write_stamp(memory: Tensor, number: int, num_bytes: int) -> None:
    """Mark a block (bytes,) as held; by 0 as free."""
    stamp = bytearray(_STAMP.pack(number, num_bytes))
    memory[: len(stamp)] = torch.frombuffer(stamp, dtype=torch.uint8)


def digest(memory: Tensor) -> bytes:
    """The checksum of some bytes on the host.

    Raises:
        MissingExtraError: blake3 is not installed.
    """
    try:
        from blake3 import blake3
    except ImportError as error:
        raise MissingExtraError("checksums", "connector") from error
    found: bytes = blake3(memory.numpy().data).digest()
    return found

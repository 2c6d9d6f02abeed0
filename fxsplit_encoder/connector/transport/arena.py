"""Anonymous memory that two processes share. Descriptors are its only names: it ends with its last holder."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fxsplit_encoder.connector.transport.layout import (
    ALIGNMENT,
    Handle,
    Payload,
    check_layouts,
    copy_out,
    from_plain,
)
from fxsplit_encoder.errors import InputError, MissingExtraError, TransportError

NAME = "fxsplit_encoder"
"""What /proc/PID/maps calls it."""

# The size is sealed: a reader whose memory was cut short under it would die of SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """A mapped range of shared memory. Pages take memory once they are written."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map: mmap.mmap | None = mmap.mmap(descriptor, num_bytes)
        # Through NumPy, which keeps the mapping from being closed; `torch.frombuffer` would not.
        self._memory: Tensor | None = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))

    def view(self, offset: int, num_bytes: int) -> Tensor:
        """A part (bytes,), which keeps all of it mapped; raises TransportError where it is closed."""
        memory = self._memory
        if memory is None:
            raise TransportError("the shared memory is closed")
        return memory[offset : offset + num_bytes]

    def drop_pages(self, offset: int, num_bytes: int) -> None:
        """Give the pages of a range back to the system; they read as zeros from then on."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        mapped = self._map
        if length > 0 and mapped is not None:
            mapped.madvise(mmap.MADV_REMOVE, start, length)

    def close(self) -> None:
        """Unmap it with the last view of it; idempotent."""
        self._memory = self._map = None


class OwnArena(Arena):
    """Memory that this process makes."""

    def __init__(self, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            super().__init__(self.descriptor, num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            os.close(self.descriptor)
            raise InputError(
                f"max_bytes: {num_bytes} bytes of shared memory cannot be made: {error}"
            ) from error

    @property
    def resident_bytes(self) -> int:
        """Bytes of its pages that take memory."""
        return os.fstat(self.descriptor).st_blocks * 512 if self.descriptor >= 0 else 0

    def close(self) -> None:
        """Give it up; the other end keeps what it has mapped."""
        super().close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def adopt(descriptor: int, num_bytes: int) -> Arena:
    """Map memory that another process made, and close the descriptor.

    Raises:
        TransportError: the descriptor is of something else, or its size could still change.
    """
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_size != num_bytes or num_bytes <= 0:
            raise TransportError(
                f"expected {num_bytes} bytes of shared memory; got a descriptor of {state.st_size} bytes"
            )
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise TransportError("expected shared memory of a sealed size")
        return Arena(descriptor, num_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise TransportError(f"shared memory that was handed over cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


_STAMP = struct.Struct("<QQ")


class BlockReader:
    """The blocks of one memory."""

    def __init__(self, owner: str, arena: Arena) -> None:
        self.owner = owner
        self._arena = arena

    def get(self, handle: Handle, into: Mapping[str, Tensor] | None = None) -> Payload:
        """Copies of a handle's tensors."""
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
    """The checksum of some bytes on the host; raises MissingExtraError where blake3 is not installed."""
    try:
        from blake3 import blake3
    except ImportError as error:
        raise MissingExtraError("checksums", "connector") from error
    found: bytes = blake3(memory.numpy().data).digest()
    return found

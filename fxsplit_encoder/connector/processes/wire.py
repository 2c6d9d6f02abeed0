"""What an encoder process and its parent share: one memory file, and messages over one socket.

The file is anonymous: descriptors are its only names, and it ends with its last holder. Each process puts
tensors into its own half, and reads the other's. A message is its length and MessagePack of a declared type:
nothing that is decoded names code to run.
"""

from __future__ import annotations

import builtins
import fcntl
import inspect
import math
import mmap
import os
import select
import socket
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from fxsplit_encoder import errors
from fxsplit_encoder.connector.interfaces import Modality
from fxsplit_encoder.errors import InputError, MissingExtraError, TransportError, TransportFullError
from fxsplit_encoder.messages import name_of, shown

try:
    import msgspec
except ImportError as error:
    raise MissingExtraError("encoder processes", "connector") from error

NAME = "fxsplit_encoder"
"""What /proc/PID/maps calls the memory."""

ALIGNMENT = 64
"""Bytes. Every tensor begins at a multiple, as vector instructions like it."""

# The size is sealed: a reader whose memory was cut short under it would die of SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 "
    "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of everything that is sent."""


# --- memory


class Layout(Message, frozen=True):
    """One contiguous tensor in a block."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the block, in bytes."""


class Block(Message, frozen=True):
    """Tensors that were put into a half, as the other process reads them."""

    number: int
    """Never given twice."""
    offset: int
    num_bytes: int
    tensors: tuple[Layout, ...]


def lay_out(buffers: Mapping[str, Tensor]) -> tuple[tuple[Layout, ...], int]:
    """Where each tensor lies in a block, and the block's bytes; InputError for what is no plain tensor."""
    layouts, end = [], 0
    for name, tensor in buffers.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"buffers.{name_of(name)}: expected a tensor; got {shown(tensor)}")
        if (
            tensor.layout != torch.strided
            or tensor.is_meta
            or tensor.is_nested
            or tensor.dtype not in _NAME_OF
        ):
            raise InputError(
                f"buffers.{name_of(name)}: expected a dense tensor with values, of a dtype of whole bytes; "
                f"got {tensor.layout}, {tensor.dtype}, on {tensor.device}"
            )
        layouts.append(Layout(name, _NAME_OF[tensor.dtype], tuple(tensor.shape), end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(layouts), max(end, ALIGNMENT)


def _view(memory: Tensor, layout: Layout) -> Tensor:
    """A tensor in its block (bytes,); raises TransportError where it does not lie in it."""
    dtype = DTYPES.get(layout.dtype)
    if dtype is not None and layout.offset >= 0 and all(0 <= size < 1 << 47 for size in layout.shape):
        end = layout.offset + math.prod(layout.shape) * dtype.itemsize
        if end <= len(memory) and layout.offset % ALIGNMENT == 0:
            return memory[layout.offset : end].view(dtype).view(layout.shape)
    raise TransportError(f"a tensor that was handed over does not lie in its block: {shown(layout)}")


class SharedMemory:
    """Maps a file of two halves of `max_bytes`, made by the other process if there is a descriptor of it.

    InputError: so much cannot be made.
    """

    def __init__(self, max_bytes: int, descriptor: int | None = None) -> None:
        self.half_bytes = -(-max_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        made = descriptor is None
        self.descriptor = (
            os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if descriptor is None else descriptor
        )
        try:
            if made:
                os.ftruncate(self.descriptor, 2 * self.half_bytes)
                fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._map: mmap.mmap | None = mmap.mmap(self.descriptor, 2 * self.half_bytes)
        except (OSError, ValueError, OverflowError) as error:
            os.close(self.descriptor)
            raise InputError(
                f"max_bytes: {max_bytes} bytes of shared memory cannot be made: {error}"
            ) from error
        # Through NumPy, which keeps the mapping from being closed; `torch.frombuffer` would not.
        self._memory: Tensor | None = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))

    @property
    def resident_bytes(self) -> int:
        """Bytes of its pages that take memory."""
        return os.fstat(self.descriptor).st_blocks * 512 if self.descriptor >= 0 else 0

    def view(self, half: int, offset: int, num_bytes: int) -> Tensor:
        """Bytes of a half, which keep all of it mapped; raises TransportError where they are not in it."""
        if self._memory is None:
            raise TransportError("the shared memory is closed")
        if offset < 0 or num_bytes < 0 or offset % ALIGNMENT or offset + num_bytes > self.half_bytes:
            raise TransportError(f"{num_bytes} bytes at {offset} are not within the shared memory")
        start = half * self.half_bytes + offset
        return self._memory[start : start + num_bytes]

    def read(self, half: int, block: Block) -> dict[str, Tensor]:
        """The tensors of a block where they lie, until it is released."""
        memory = self.view(half, block.offset, block.num_bytes)
        return {layout.name: _view(memory, layout) for layout in block.tensors}

    def drop_pages(self, half: int, offset: int, num_bytes: int) -> None:
        """Give the pages of a range back to the system."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        mapped = self._map
        if length > 0 and mapped is not None:
            mapped.madvise(mmap.MADV_REMOVE, half * self.half_bytes + start, length)

    def close(self) -> None:
        """Unmap it with the last view of it; idempotent."""
        self._memory = self._map = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Half:
    """The half that this process puts tensors into: first fit, longest waiting first.

    Its first `kept_bytes` stay resident once they are free, for the next that is put.
    """

    def __init__(self, memory: SharedMemory, index: int, kept_bytes: int = 64 << 20) -> None:
        self._memory = memory
        self._index = index
        self._kept_bytes = kept_bytes
        self._held: dict[int, tuple[int, int]] = {}
        """Offset and bytes, by number."""
        self._last = 0
        self._is_open = True
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Bytes that are not released."""
        with self._changed:
            return sum(num_bytes for _, num_bytes in self._held.values())

    def put(self, buffers: Mapping[str, Tensor], timeout: float = 0.0) -> Block:
        """Copy tensors of any shape, strides and device into a block, once there is room.

        Raises:
            InputError: they can never be held, for their kind or their size.
            TransportFullError: there was no room for them within `timeout` seconds.
            TransportError: it is closed.
        """
        layouts, num_bytes = lay_out(buffers)
        number, offset = self._take(num_bytes, timeout)
        try:
            memory = self._memory.view(self._index, offset, num_bytes)
            with torch.no_grad():
                for layout in layouts:
                    _view(memory, layout).copy_(buffers[layout.name])
        except BaseException:
            self.release(number)
            raise
        return Block(number, offset, num_bytes, layouts)

    def _take(self, num_bytes: int, timeout: float) -> tuple[int, int]:
        most = self._memory.half_bytes
        if num_bytes > most:
            raise InputError(f"buffers: expected at most max_bytes={most}; got {num_bytes} bytes")
        deadline = time.monotonic() + timeout
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                while (offset := self._gap(num_bytes)) is None or self._waiting[0] is not turn:
                    left = deadline - time.monotonic()
                    if self._is_open and (left <= 0 or not self._changed.wait(left)):
                        raise TransportFullError(f"{num_bytes} bytes do not fit beside those that are held")
                    if not self._is_open:
                        break
                if not self._is_open or offset is None:
                    raise TransportError("the shared memory is closed")
                self._last += 1
                self._held[self._last] = offset, num_bytes
                return self._last, offset
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def _gap(self, num_bytes: int) -> int | None:
        """The offset of the lowest free range that is large enough."""
        end = 0
        for offset, length in sorted(self._held.values()):
            if offset - end >= num_bytes:
                return end
            end = offset + length
        return end if self._memory.half_bytes - end >= num_bytes else None

    def release(self, number: int) -> None:
        """Free a block; one that is not held is left alone."""
        with self._changed:
            if (held := self._held.get(number)) is None:
                return
            # What lies below is reused first, so its pages stay; what only a peak needed is given back.
            start = max(held[0], self._kept_bytes)
            self._memory.drop_pages(self._index, start, sum(held) - start)
            del self._held[number]
            self._changed.notify_all()

    def close(self) -> None:
        """Hold nothing any more, and wake all that wait for room; idempotent."""
        with self._changed:
            self._is_open = False
            self._held.clear()
            self._changed.notify_all()


# --- messages

START = 0
"""The number of the request that starts the encoder; those to encode count from 1."""


class WireError(Message, frozen=True):
    """An error as plain values."""

    kind: str
    arguments: list[Any]
    text: str
    traceback: str


class WireItem(Message, frozen=True):
    """A prepared item without its inputs."""

    modality: Modality
    digest: bytes
    num_tokens: int
    metadata: dict[str, Any]


class Start(Message, frozen=True):
    """Make an encoder and start it."""

    factory: str
    arguments: dict[str, Any]


class Encode(Message, frozen=True):
    """Encode items as one batch. All inputs are one block: batches that wait for room hold no part of it."""

    request: int
    items: list[WireItem]
    inputs: Block
    """The tensors by "index/name"."""


class Release(Message, frozen=True):
    """Free a block of the reader's half."""

    number: int


class Stop(Message, frozen=True):
    """End, after what was asked before."""


class Started(Message, frozen=True):
    """The encoder is ready."""

    row_bytes: dict[Modality, int]


class Encoded(Message, frozen=True):
    """Features of a request, by the index of their item; some of them or the last."""

    request: int
    features: dict[int, Block]
    is_last: bool


class Failed(Message, frozen=True):
    """A request failed as a whole."""

    request: int
    error: WireError


ToEncoder = Start | Encode | Release | Stop
FromEncoder = Started | Encoded | Failed | Release

_HEAD = struct.Struct("<I")
_MOST_BYTES = 32 << 20
_SEND_SECONDS = 30.0
_MOST_ARRAY_BYTES = 1 << 20
_TENSOR, _ARRAY = 1, 2

T = TypeVar("T")


class Channel(Generic[T]):
    """One end of a socket.

    Args:
        connection: a connected Unix socket, which belongs to the channel.
        process: a descriptor of the other process, whose end is noticed though others have its socket.
        kinds: the messages that are read.
    """

    def __init__(self, connection: socket.socket, process: int, kinds: Any) -> None:
        connection.settimeout(_SEND_SECONDS)
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(process, select.POLLIN)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds, ext_hook=_unpacked)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_packed)
        self._lock = threading.Lock()

    def encode(self, message: Message) -> bytes:
        """A message's bytes; raises InputError where it holds what no message may, or too much."""
        try:
            data = self._encoder.encode(message)
        except (TypeError, OverflowError, RecursionError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"values: expected numbers, strings and small tensors; {error}") from error
        if len(data) > _MOST_BYTES:
            raise InputError(f"values: expected at most {_MOST_BYTES} bytes of them; got {len(data)}")
        return _HEAD.pack(len(data)) + data

    def send(self, data: bytes) -> None:
        """Send what `encode` gave; raises OSError where the other process does not read it."""
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> T | None:
        """The next message, however long it takes; None: the other process has ended, or hung up.
        TransportError: it is none that is expected.
        """
        head = self._read(_HEAD.size)
        size = _HEAD.unpack(head)[0] if head else 0
        if size > _MOST_BYTES:
            raise TransportError(f"a message of {size} bytes, which none has")
        if not head or (data := self._read(size)) is None:
            return None
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise TransportError(f"a message that cannot be read: {error}") from error

    def _read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            ready = dict(self._poll.poll())
            if self._socket.fileno() not in ready:
                return None
            try:
                data = self._socket.recv(size - len(parts))
            except OSError:
                return None
            if not data:
                return None
            parts += data
        return bytes(parts)

    def close(self) -> None:
        """Hang up; idempotent."""
        self._socket.close()


def _packed(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, Tensor | np.ndarray):
        raise InputError(
            f"values: expected numbers, strings, small tensors, lists or mappings; got {shown(value)}"
        )
    try:
        tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except TypeError:
        raise InputError(f"values: expected an array of numbers; got {shown(value)}") from None
    if tensor.dtype not in _NAME_OF or tensor.layout != torch.strided or tensor.nbytes > _MOST_ARRAY_BYTES:
        raise InputError(
            f"values: expected a dense tensor of at most {_MOST_ARRAY_BYTES} bytes; got {shown(value)}"
        )
    flat = tensor.contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    code = _TENSOR if isinstance(value, Tensor) else _ARRAY
    return msgspec.msgpack.Ext(
        code, msgspec.msgpack.encode((_NAME_OF[tensor.dtype], list(tensor.shape), data))
    )


def _unpacked(code: int, packed: memoryview) -> object:
    name, shape, data = msgspec.msgpack.decode(packed, type=tuple[str, list[int], bytes])
    if code not in (_TENSOR, _ARRAY) or name not in DTYPES:
        raise ValueError(f"a value of no known kind: {code}, {name}")
    try:
        tensor = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).view(DTYPES[name]).view(shape)
    except RuntimeError as error:
        raise ValueError(f"an array that is not what it says: {error}") from None
    return tensor if code == _TENSOR else tensor.numpy()


# --- errors

_MOST_CHARACTERS = 1 << 16


def _classes(module: Any, base: type[Exception]) -> dict[str, type[Exception]]:
    found = {name: value for name, value in vars(module).items() if inspect.isclass(value)}
    return {name: value for name, value in found.items() if issubclass(value, base)}


KNOWN: dict[str, type[Exception]] = {
    **_classes(builtins, Exception),
    "OutOfMemoryError": torch.OutOfMemoryError,
    **_classes(errors, errors.FxSplitError),
}
"""By name, the classes that come back as themselves."""


def to_wire(error: BaseException) -> WireError:
    """An error as plain values, with where it was raised."""
    kind = next(cls for cls in type(error).__mro__ if KNOWN.get(cls.__name__) is cls or cls is BaseException)
    is_itself = kind is type(error)
    text = str(error) if is_itself else f"{type(error).__name__}: {error}"
    plain = [_cut(value) for value in error.args if isinstance(value, bool | int | float | str)]
    arguments = plain if is_itself and len(plain) == len(error.args) else [_cut(text)]
    return WireError(kind.__name__, arguments, _cut(text), _cut("".join(traceback.format_exception(error))))


def _cut(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > 63:
        return str(value)
    return value[:_MOST_CHARACTERS] if isinstance(value, str) else value


def from_wire(wire: WireError, pid: int) -> Exception:
    """The error that `to_wire` was given, with a note of what happened in the other process."""
    error: Exception = RuntimeError(f"{wire.kind}: {wire.text}")
    if (kind := KNOWN.get(wire.kind)) is not None:
        try:
            error = kind(*wire.arguments)
        except Exception:  # a class that is made from other things than a message
            pass
    error.add_note(f"In the encoder process {pid}:\n{wire.traceback}")
    return error

"""Messages between an encoder process and its parent: over one socket, with tensors in one memory file.

    parent                            encoder process
    EncoderProgram(...)         ->    makes the encoder and starts it
                                <-    Started(row_bytes), or Failed
    Encode(items)               ->    encodes them as one batch
                                <-    Encoded(features), or Failed

One side asks, the other answers. A message is MessagePack of a declared type: nothing that is decoded names
code to run. It lies behind its tensors in the sender's half of the file, which the sender uses again once it
has an answer; the socket carries where, and how long it is. The file is anonymous: descriptors are its only
names, and it ends with its last holder.
"""

from __future__ import annotations

import builtins
import fcntl
import inspect
import math
import mmap
import os
import pkgutil
import select
import socket
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from fxsplit_encoder import errors
from fxsplit_encoder.connector.interfaces import Modality, PreparedItem
from fxsplit_encoder.errors import InputError, MissingExtraError, TransportError
from fxsplit_encoder.messages import shown

try:
    import msgspec
except ImportError as error:
    raise MissingExtraError("encoder processes", "connector") from error

NAME = "fxsplit_encoder"
"""The name of the memory in /proc/PID/maps."""

ALIGNMENT = 64
"""Bytes. Every tensor begins at a multiple, for vector instructions."""

_MOST_BYTES = 32 << 20
"""Bytes of a message besides its tensors."""

_KEPT_BYTES = 64 << 20
"""Bytes of a half whose pages stay resident between messages; beyond, they go back to the system."""

# The size is sealed: a reader whose memory was cut short under it would die of SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 "
    "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


# --- memory


class SharedMemory:
    """Maps a file of two halves, each for a message with tensors of `max_bytes`, with a descriptor the
    other's; InputError: it cannot be.
    """

    def __init__(self, max_bytes: int, descriptor: int | None = None) -> None:
        self.max_bytes = -(-max_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.half_bytes = self.max_bytes + _MOST_BYTES
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.descriptor = os.memfd_create(NAME, flags) if descriptor is None else descriptor
        try:
            if max_bytes <= 0:
                raise ValueError("expected a positive number")
            if descriptor is None:
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

    def view(self, half: int, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """A tensor in a half, which stays mapped as long; TransportError: it does not lie in the half."""
        if self._memory is None:
            raise TransportError("the shared memory is closed")
        if offset >= 0 and offset % ALIGNMENT == 0 and all(0 <= size < 1 << 47 for size in shape):
            end = offset + math.prod(shape) * dtype.itemsize
            if end <= self.half_bytes:
                start = half * self.half_bytes
                return self._memory[start + offset : start + end].view(dtype).view(tuple(shape))
        raise TransportError(f"{dtype} of {shown(shape)} at {offset} is not within the shared memory")

    def trim(self, half: int, num_bytes: int) -> None:
        """Give pages of the first bytes of a half back to the system, but for those that are kept."""
        length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE - _KEPT_BYTES
        if length > 0 and self._map is not None:
            self._map.madvise(mmap.MADV_REMOVE, half * self.half_bytes + _KEPT_BYTES, length)

    def close(self) -> None:
        """Unmap it with the last view of it; idempotent."""
        self._memory = self._map = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


# --- messages


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of everything that is sent."""


class EncoderProgram(Message, frozen=True):
    """An encoder, by the name of the function that makes it: nothing of it is serialized.

    ``factory`` is "package.module:function". The function is called in the process with ``arguments`` by name
    and returns a `FeatureEncoder`. Arguments are numbers, strings, bytes, None, small tensors and arrays, and
    lists and mappings of them; tuples arrive as lists.
    """

    factory: str
    arguments: dict[str, Any] = {}

    def resolve(self) -> Callable[..., Any]:
        """The function itself; InputError: there is none of this name."""
        module = self.factory.partition(":")[0]
        found: Callable[..., Any] | None = None
        try:
            found = pkgutil.resolve_name(self.factory)
        except (ValueError, AttributeError, ModuleNotFoundError) as error:
            if isinstance(error, ImportError) and not f"{module}.".startswith(f"{error.name}."):
                raise
        if not callable(found):
            raise InputError(f"factory: no package.module:function is {shown(self.factory)}")
        return found


class Encode(Message, frozen=True):
    """Encode items as one batch."""

    items: list[PreparedItem]


class Started(Message, frozen=True):
    """The encoder is ready."""

    row_bytes: dict[Modality, int]


class Encoded(Message, frozen=True):
    """The features of a batch, in order of its items."""

    features: list[Tensor]


class Failed(Message, frozen=True):
    """The encoder was not started, or a batch failed as a whole: an error as plain values."""

    kind: str
    arguments: list[bool | int | float | str]
    traceback: str


ToEncoder = EncoderProgram | Encode
FromEncoder = Started | Encoded | Failed

_PACKET = struct.Struct("<QQ")
_TENSOR, _ARRAY = 1, 2
_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)

T = TypeVar("T")


class Channel(Generic[T]):
    """One end of a socket, with one half of a memory for its messages.

    Args:
        connection: a connected Unix socket of packets, which belongs to the channel.
        process: a descriptor of the other process, whose end is noticed though others have its socket.
        kinds: the messages that are read.
        memory: of both processes.
        half: 0 of the parent, 1 of the encoder process.
    """

    def __init__(
        self, connection: socket.socket, process: int, kinds: Any, memory: SharedMemory, half: int
    ) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(process, select.POLLIN)
        self._memory = memory
        self._half = half
        self._end = 0
        """Bytes of the half that the last message takes."""
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds, ext_hook=self._unpacked)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._packed)

    # --- sending

    def encode(self, message: Message) -> bytes:
        """A message's bytes; raises InputError where it holds what no message may, or too much."""
        self._end = 0
        try:
            data = self._encoder.encode(message)
        except InputError:
            raise
        except _UNREADABLE as error:
            raise InputError(f"values: expected numbers, strings and tensors; {error}") from error
        if len(data) > _MOST_BYTES:
            raise InputError(f"values: expected at most {_MOST_BYTES} bytes of them; got {len(data)}")
        place, self._end = self._end, self._end + len(data)
        self._words(self._half, place, len(data))[:] = np.frombuffer(data, np.uint8)
        return _PACKET.pack(place, len(data))

    def send(self, packet: bytes) -> None:
        """Send what `encode` gave; raises OSError where the other process does not read it."""
        self._socket.sendall(packet)

    def _words(self, half: int, offset: int, num_bytes: int) -> Any:
        return self._memory.view(half, offset, torch.uint8, [num_bytes]).numpy()

    def _packed(self, value: object) -> object:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, Tensor | np.ndarray):
            raise InputError(
                f"values: expected numbers, strings, tensors, lists or mappings; got {shown(value)}"
            )
        try:
            tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        except TypeError:
            raise InputError(f"values: expected an array of numbers; got {shown(value)}") from None
        if (
            tensor.layout != torch.strided
            or tensor.is_meta
            or tensor.is_nested
            or tensor.dtype not in _NAME_OF
        ):
            raise InputError(
                "values: expected a dense tensor with values, of a dtype of whole bytes; "
                f"got {tensor.layout}, {tensor.dtype}, on {tensor.device}"
            )
        offset, end = self._end, self._end + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if end > (most := self._memory.max_bytes):
            raise InputError(f"values: expected tensors of at most max_bytes={most}; got {end} bytes")
        with torch.no_grad():
            self._memory.view(self._half, offset, tensor.dtype, tensor.shape).copy_(tensor)
        self._end = end
        place = (_NAME_OF[tensor.dtype], tuple(tensor.shape), offset)
        code = _TENSOR if isinstance(value, Tensor) else _ARRAY
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(place))

    # --- receiving

    def receive(self, timeout: float | None = None) -> T | None:
        """The next message, its tensors where they lie, until this process sends again.

        Returns:
            None: the other process has ended, or hung up.

        Raises:
            TimeoutError: none has come within so many seconds.
            TransportError: it is none that is expected.
        """
        ready = dict(self._poll.poll(None if timeout is None else 1e3 * timeout))
        if not ready:
            raise TimeoutError
        try:  # the other may have ended, and have said something before
            packet = self._socket.recv(_PACKET.size + 1) if self._socket.fileno() in ready else b""
        except OSError:
            packet = b""
        if not packet:
            return None
        try:
            data = self._words(1 - self._half, *_PACKET.unpack(packet)).tobytes()
            self._memory.trim(self._half, self._end)  # the other has read what lies there
            return self._decoder.decode(data)
        except (*_UNREADABLE, struct.error) as error:
            raise TransportError(f"a message that cannot be read: {error}") from error

    def _unpacked(self, code: int, packed: memoryview) -> object:
        name, shape, offset = msgspec.msgpack.decode(packed, type=tuple[str, tuple[int, ...], int])
        if code not in (_TENSOR, _ARRAY) or name not in DTYPES:
            raise ValueError(f"a value of no known kind: {code}, {name}")
        tensor = self._memory.view(1 - self._half, offset, DTYPES[name], shape)
        return tensor if code == _TENSOR else tensor.numpy()

    def close(self) -> None:
        """Close the socket, which ends an encoder process after the batch that it has; idempotent."""
        self._socket.close()


def has_ended(process: int, seconds: float | None = None) -> bool:
    """Whether a process has ended, by its descriptor, within so many seconds; None: wait until it has."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1e3 * seconds))


# --- errors

_MOST_CHARACTERS = 1 << 16


_PUBLIC = {name: value for module in (builtins, errors) for name, value in vars(module).items()}
KNOWN: dict[str, type[Exception]] = {
    **{k: v for k, v in _PUBLIC.items() if inspect.isclass(v) and issubclass(v, Exception)},
    "OutOfMemoryError": torch.OutOfMemoryError,
    "AcceleratorError": torch.AcceleratorError,
}
"""By name, the classes that come back as themselves."""


def to_wire(error: BaseException) -> Failed:
    """An error as plain values, with where it was raised."""
    kind = next(cls for cls in type(error).__mro__ if KNOWN.get(cls.__name__) is cls or cls is BaseException)
    is_itself = kind is type(error)
    text = str(error) if is_itself else f"{type(error).__name__}: {error}"
    plain = [_cut(value) for value in error.args if isinstance(value, bool | int | float | str)]
    arguments = plain if is_itself and len(plain) == len(error.args) else [_cut(text)]
    return Failed(kind.__name__, arguments, _cut("".join(traceback.format_exception(error))))


def _cut(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > 63:
        return str(value)
    # A file's name, as errors tell it, may have lone surrogates, which have no bytes.
    return value[:_MOST_CHARACTERS].encode(errors="replace").decode() if isinstance(value, str) else value


def from_wire(wire: Failed, pid: int) -> Exception:
    """The error that `to_wire` was given, with a note of what happened in the other process."""
    try:
        error = KNOWN[wire.kind](*wire.arguments)
    except (KeyError, TypeError, ValueError):
        # A class that this process does not know, or one that is made from other things than a message, such
        # as `UnicodeDecodeError` and `ExceptionGroup`.
        error = RuntimeError(f"{wire.kind}: {', '.join(map(str, wire.arguments))}")
    error.add_note(f"In the encoder process {pid}:\n{wire.traceback}")
    return error

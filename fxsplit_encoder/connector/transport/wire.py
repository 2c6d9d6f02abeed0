"""Messages as bytes: a magic word, the version of the protocol, and MessagePack of a declared type.

Nothing that is decoded names code to run: a message is one of the types that its reader expects, or an error.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

from fxsplit_encoder.errors import MissingExtraError, TransportError

try:
    import msgspec
except ImportError as error:
    raise MissingExtraError("handing tensors to another process", "connector") from error

VERSION = 1
"""Of every message. It changes with any change of a message's fields."""

MOST_BYTES = 32 << 20
"""Of one message. Tensors are in shared memory."""

_MAGIC = b"fxse"
_HEAD = struct.Struct("<4sH")

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of everything that is sent."""


class Codec(Generic[T]):
    """Reads and writes the messages of one direction.

    Args:
        kinds: the union of the types that are read.
        version: another than this library's is for tests.
    """

    def __init__(self, kinds: Any, version: int = VERSION) -> None:
        self._head = _HEAD.pack(_MAGIC, version)
        self._version = version
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: Message) -> bytes:
        """A message's bytes.

        Raises:
            TransportError: it is too large.
        """
        data = self._head + self._encoder.encode(message)
        if len(data) > MOST_BYTES:
            raise TransportError(f"a message of {len(data)} bytes; at most {MOST_BYTES} are sent")
        return data

    def decode(self, data: bytes) -> T:
        """The message of some bytes.

        Raises:
            TransportError: they are none that is expected, or of another version.
        """
        if len(data) < _HEAD.size or len(data) > MOST_BYTES:
            raise TransportError(f"a message of {len(data)} bytes, which none has")
        magic, version = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise TransportError("a message that begins as none does")
        if version != self._version:
            raise TransportError(
                f"expected version {self._version} of the protocol; got {version}: both processes need "
                "the same version of fxsplit-encoder"
            )
        try:
            return self._decoder.decode(memoryview(data)[_HEAD.size :])
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise TransportError(f"a message that cannot be read: {error}") from error

"""Messages as bytes: a magic word, the version of the protocol, and MessagePack of a declared type.

Nothing that is decoded names code to run: a message is one of the types that its reader expects, or an error.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

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
    """Reads and writes the messages of one direction."""

    def __init__(self, kinds: Any, version: int = VERSION) -> None:
        self._head = _HEAD.pack(_MAGIC, version)
        self._version = version
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: Message) -> bytes:
        """A message's bytes; raises TransportError where it is too large."""
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


logger = logging.getLogger(__name__)

_MOST_PACKET_BYTES = 1 << 16
_MOST_DESCRIPTORS = 4
_SEND_SECONDS = 30.0
_GONE = select.POLLHUP | select.POLLERR | select.POLLRDHUP


class Greeting(Message, frozen=True):
    """The first packet of each side: its memory, whose descriptor comes with it."""

    owner: str
    num_bytes: int


class Released(Message, frozen=True):
    """Blocks of one of the reader's memories that the sender will not read again."""

    owner: str
    numbers: list[int]


Packet = Greeting | Released


class Received(NamedTuple):
    """A packet with the descriptors that came with it."""

    message: Packet
    descriptors: list[int]


def connected_sockets() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep packets apart; neither has a name in any file system."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Peer:
    """One end of a connection. A thread reads what the other end says until that hangs up.

    Args:
        connection: a connected Unix socket that keeps packets apart; it is closed with this object.
        on_released: called with the owner and the numbers of blocks, on that thread.
        on_hang_up: called once on that thread if the other end is gone, or says what nobody understands.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_released: Callable[[str, Sequence[int]], None],
        on_hang_up: Callable[[], None],
    ) -> None:
        if connection.family != socket.AF_UNIX or connection.type != socket.SOCK_SEQPACKET:
            raise TransportError(f"expected a Unix socket of packets; got {connection.family!r}")
        self._socket = connection
        self._socket.settimeout(_SEND_SECONDS)
        self._codec: Codec[Packet] = Codec(Packet)
        self._on_released = on_released
        self._on_hang_up = on_hang_up
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def greet(self, message: Message, descriptors: Sequence[int], timeout: float) -> Received:
        """Exchange first packets, then listen.

        Raises:
            TransportError: the other end hung up, did not answer in time, or is of another version.
        """
        self._send(message, descriptors)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(timeout * 1000):
            raise TransportError(f"the other process did not greet within {timeout:g} s")
        received = self._receive_first()
        self._thread = threading.Thread(target=self._listen, name="fxsplit-peer", daemon=True)
        self._thread.start()
        return received

    def _send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._socket, [self._codec.encode(message)], list(descriptors))
        except OSError as error:
            raise TransportError(f"the other process does not read what it is sent: {error}") from error

    def _receive_first(self) -> Received:
        try:
            data, descriptors, *_ = socket.recv_fds(
                self._socket, _MOST_PACKET_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise TransportError(f"the other process hung up: {error}") from error
        if not data:
            raise TransportError("the other process hung up before it greeted")
        try:
            return Received(self._codec.decode(data), descriptors)
        except TransportError:
            close_all(descriptors)
            raise

    def tell_released(self, owner: str, numbers: Sequence[int]) -> None:
        """Say that blocks will not be read again. A process that is gone need not know."""
        try:
            self._send(Released(owner, list(numbers)))
        except TransportError:
            self._shut_down()

    def _listen(self) -> None:
        try:
            self._read_until_gone()
        except Exception:  # of `on_released`: nothing is given back any more, and nobody may wait for it
            logger.warning("word of what the other process released could not be taken", exc_info=True)
            self._shut_down()
        if not self._is_closing:
            self._on_hang_up()

    def _read_until_gone(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLRDHUP)
        while True:
            ((_, event),) = poll.poll()
            if event & select.POLLIN and self._read_packets():
                continue
            if event & _GONE or event & select.POLLIN:
                return

    def _read_packets(self) -> bool:
        """Whether what came was understood."""
        try:
            # Without room for descriptors: the system closes any that come.
            data = self._socket.recv(_MOST_PACKET_BYTES, socket.MSG_DONTWAIT)
            message = self._codec.decode(data)
        except BlockingIOError:
            return True
        except (OSError, TransportError):
            return False
        if not isinstance(message, Released):
            return False
        self._on_released(message.owner, message.numbers)
        return True

    def _shut_down(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Hang up; idempotent."""
        self._is_closing = True
        self._shut_down()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._socket.close()


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that nobody asked for."""
    for descriptor in descriptors:
        os.close(descriptor)

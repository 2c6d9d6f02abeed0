"""The control sockets of two processes: ZeroMQ over a Unix path inside a private directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, TypeVar

from fxsplit_encoder.connector.transport.wire import MOST_BYTES, Codec, Message
from fxsplit_encoder.errors import MissingExtraError

try:
    import zmq
except ImportError as error:
    raise MissingExtraError("encoder processes", "connector") from error

T = TypeVar("T")


class ControlSocket(Generic[T]):
    """What both ends have in common. Its methods are called by one thread at a time.

    Args:
        kind: of the ZeroMQ socket.
        codec: of the messages that come.
    """

    def __init__(self, kind: int, codec: Codec[T]) -> None:
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        # What waits is bounded by the tensors that it names, all of them in bounded memory.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self._codec = codec

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket, after what waits has been sent or `linger_ms` have passed; idempotent."""
        self.socket.close(linger=linger_ms)
        self._context.term()


class ControlServer(ControlSocket[T]):
    """The end of the process that starts the other. It listens to a single client, known by its identity.

    Args:
        path: of the socket.
        codec: of the messages that come.
    """

    def __init__(self, path: Path, codec: Codec[T]) -> None:
        super().__init__(zmq.ROUTER, codec)
        self.identity = b""
        """Of the client; messages of others are dropped."""
        self.num_dropped = 0
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(f"ipc://{path}")

    def send(self, data: bytes) -> bool:
        """Send what a codec has encoded. Whether the client is there."""
        try:
            self.socket.send_multipart([self.identity, data], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self, timeout_ms: int = 0) -> T | None:
        """The next message; None: none came in time.

        Raises:
            TransportError: it is none that is expected.
        """
        while self.socket.poll(timeout_ms):
            parts: list[Any] = self.socket.recv_multipart(zmq.NOBLOCK)
            if len(parts) == 2 and parts[0] == self.identity:
                return self._codec.decode(parts[1])
            self.num_dropped += 1
        return None


class ControlClient(ControlSocket[T]):
    """The end of the process that was started.

    Args:
        path: of the socket.
        identity: by which the server knows it.
        codec: of the messages that come.
    """

    def __init__(self, path: Path, identity: bytes, codec: Codec[T]) -> None:
        super().__init__(zmq.DEALER, codec)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(f"ipc://{path}")

    def send(self, message: Message) -> None:
        """Send a message."""
        self.socket.send(self._codec.encode(message))

    def receive(self) -> T:
        """The next message, however long it takes.

        Raises:
            TransportError: it is none that is expected.
        """
        return self._codec.decode(self.socket.recv())

"""Messages between a process and its encoder process, errors among them, over ZeroMQ on a Unix path."""

from __future__ import annotations

import builtins
import inspect
import traceback
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from fxsplit_encoder import errors
from fxsplit_encoder.connector.interfaces import Modality
from fxsplit_encoder.connector.transport.layout import Handle
from fxsplit_encoder.connector.transport.wire import MOST_BYTES, Codec, Message
from fxsplit_encoder.errors import MissingExtraError

START = 0
"""The number of the request that starts the encoder; those to encode count from 1."""


class WireError(Message, frozen=True):
    """An error as plain values."""

    kind: str
    arguments: list[Any]
    text: str
    traceback: str


class WireItem(Message, frozen=True):
    """A prepared item without its inputs and its metadata."""

    modality: Modality
    digest: bytes
    num_tokens: int


class WireFeature(Message, frozen=True):
    """The feature of one item of a request."""

    index: int
    feature: Handle


class Start(Message, frozen=True):
    """Make an encoder and start it."""

    factory: str
    arguments: dict[str, Any]


class Encode(Message, frozen=True):
    """Encode items as one batch.

    All inputs are one block of memory: several batches that each wait for room never hold a part of theirs.
    """

    request: int
    items: list[WireItem]
    inputs: Handle
    """The tensors by "index/name"; the items' metadata are the handle's."""


class Stop(Message, frozen=True):
    """End, after what was asked before."""


class Hello(Message, frozen=True):
    """The first message: the process is there, with these versions."""

    pid: int
    library: str
    torch: str


class Started(Message, frozen=True):
    """The encoder is ready."""

    row_bytes: dict[Modality, int]
    """Of a feature, by modality."""


class Encoded(Message, frozen=True):
    """Features of a request, some of them or the last."""

    request: int
    features: list[WireFeature]
    is_last: bool


class Failed(Message, frozen=True):
    """A request failed as a whole."""

    request: int
    error: WireError


ToEncoder = Start | Encode | Stop
FromEncoder = Hello | Started | Encoded | Failed


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
    where = "".join(traceback.format_exception(error))
    return WireError(kind.__name__, arguments, _cut(text), _cut(where))


def _cut(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > 63:
        return str(value)
    return value[:_MOST_CHARACTERS] if isinstance(value, str) else value


def from_wire(wire: WireError, pid: int) -> Exception:
    """The error that `to_wire` was given, with a note of what happened in the other process."""
    error = _rebuilt(wire)
    error.add_note(f"In the encoder process {pid}:\n{wire.traceback}")
    return error


def _rebuilt(wire: WireError) -> Exception:
    kind = KNOWN.get(wire.kind)
    if kind is None:
        return RuntimeError(f"{wire.kind}: {wire.text}")
    try:
        return kind(*wire.arguments)
    except Exception:  # a class that is made from other things than a message
        return RuntimeError(f"{wire.kind}: {wire.text}")


try:
    import zmq
except ImportError as error:
    raise MissingExtraError("encoder processes", "connector") from error

T = TypeVar("T")


class ControlSocket(Generic[T]):
    """What both ends have in common. Its methods are called by one thread at a time."""

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
    """The end of the process that starts the other. It listens to a single client, known by its identity."""

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
    """The end of the process that was started."""

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

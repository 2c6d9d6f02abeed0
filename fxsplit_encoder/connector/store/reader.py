"""One store, as a reader sees it."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fxsplit_encoder.connector.store.messages import (
    MOST_PACKET_BYTES,
    Answer,
    Find,
    FromStore,
    Introduction,
)
from fxsplit_encoder.connector.transport.arena import adopt
from fxsplit_encoder.connector.transport.block_reader import BlockReader
from fxsplit_encoder.connector.transport.peer import Greeting, Released, close_all
from fxsplit_encoder.connector.transport.seam import Handle, Payload
from fxsplit_encoder.connector.transport.wire import Codec, Message
from fxsplit_encoder.errors import TransportError

_MOST_DESCRIPTORS = 4


class StoreReader:
    """A connection to a store, whose memory it has mapped. Threads may share it.

    Args:
        path: of the store's socket.
        group: readers of one engine have one name.
        is_mapping: whether it reads itself, rather than for others of its group.
        timeout: seconds that the store may take for an answer; one that is slower is lost.

    Raises:
        ConnectionRefusedError: the store's process is gone.
        TransportError: it is no store of this version.
    """

    def __init__(self, path: Path, group: str = "", *, is_mapping: bool = True, timeout: float = 5.0) -> None:
        self.path = path
        self._codec: Codec[FromStore] = Codec(FromStore)
        self._lock = threading.Lock()
        self._is_lost = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(str(path))
            self._blocks = self._receive_greeting()
            self._send(Introduction(group, is_mapping))
        except (TransportError, ConnectionRefusedError):
            self._socket.close()
            raise
        except OSError as error:
            self._socket.close()
            raise TransportError(f"the store at {path} does not answer: {error}") from error

    def _receive_greeting(self) -> BlockReader:
        data, descriptors, *_ = socket.recv_fds(
            self._socket, MOST_PACKET_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        try:
            greeting = self._codec.decode(data)
            if not isinstance(greeting, Greeting) or len(descriptors) != 1:
                raise TransportError(f"expected a greeting with a descriptor; got {type(greeting).__name__}")
        except TransportError:
            close_all(descriptors)
            raise
        return BlockReader(greeting.owner, adopt(descriptors[0], greeting.num_bytes))

    @property
    def owner(self) -> str:
        """As the store's handles name it."""
        return self._blocks.owner

    @property
    def is_lost(self) -> bool:
        """Whether the store is gone. What was found can still be read."""
        if not self._is_lost:
            poll = select.poll()
            poll.register(self._socket, select.POLLRDHUP)
            self._is_lost = bool(poll.poll(0))
        return self._is_lost

    def find(self, key: bytes) -> Answer:
        """Ask for a feature, which is held until it is released.

        Raises:
            TransportError: the store is gone, or did not answer in time.
        """
        with self._lock:
            self._check()
            try:
                self._send(Find(key))
                answer = self._codec.decode(self._socket.recv(MOST_PACKET_BYTES))
            except (OSError, TransportError) as error:
                self._lose()
                raise TransportError(f"the store at {self.path} does not answer: {error}") from error
            except BaseException:  # a key that was pressed: the answer is still to come
                self._lose()
                raise
            if not isinstance(answer, Answer):
                self._lose()
                raise TransportError(f"expected an answer of the store; got {type(answer).__name__}")
            if answer.handle is not None and answer.handle.key != key:
                self._lose()
                raise TransportError(f"the store at {self.path} answered with another feature")
            return answer

    def _check(self) -> None:
        if self._is_lost:
            raise TransportError(f"the store at {self.path} is gone")

    def _lose(self) -> None:
        # An answer that comes late would be taken for that to the next question.
        self._is_lost = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _send(self, message: Message) -> None:
        self._socket.send(self._codec.encode(message))

    def get(self, handle: Handle, into: Mapping[str, Tensor] | None = None) -> Payload:
        """Copies of a feature's tensors; see `Transport.get`."""
        return self._blocks.get(handle, into)

    def view(self, handle: Handle) -> Payload:
        """A feature's tensors where they lie: valid until it is released, and to be written by nobody."""
        return self._blocks.view(handle)

    def release(self, handle: Handle) -> None:
        """Give up one hold of a feature. A store that is gone need not know."""
        try:
            with self._lock:
                self._check()
                self._send(Released(handle.owner, [handle.number]))
        except (OSError, TransportError):
            self._lose()

    def close(self) -> None:
        """Hang up, which releases all that is held, and unmap the memory; idempotent."""
        self._is_lost = True
        self._socket.close()
        self._blocks.close()

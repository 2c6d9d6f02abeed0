"""The process that has features, and what its readers ask of it."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fxsplit_encoder.connector.store.entries import Entries
from fxsplit_encoder.connector.store.messages import (
    MOST_PACKET_BYTES,
    Answer,
    Find,
    FromReader,
    Introduction,
)
from fxsplit_encoder.connector.transport.peer import Released
from fxsplit_encoder.connector.transport.private_directory import private_directory, socket_path
from fxsplit_encoder.connector.transport.seam import Handle
from fxsplit_encoder.connector.transport.shared_memory import SharedMemoryTransport
from fxsplit_encoder.connector.transport.wire import Codec
from fxsplit_encoder.errors import InputError, TransportError, TransportFullError

SUFFIX = ".store"
_SEND_SECONDS = 5.0
_BREATH_SECONDS = 0.01
_CREDENTIALS = struct.Struct("3i")
_MOST_META_BYTES = MOST_PACKET_BYTES // 2


@dataclass(frozen=True)
class StoreStats:
    """What a store has, and what happened."""

    num_features: int
    num_held: int
    num_readers: int
    held_bytes: int
    """Of its memory, features that nobody reads included."""
    puts: int
    hits: int
    misses: int
    evictions: int
    refusals: int
    """Features that did not fit beside those that readers hold."""


class _Connection:
    """A reader, as the store sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.introduction: Introduction | None = None


class FeatureStore:
    """Features by key, in shared memory of a fixed size.

    What nobody holds is given up for what comes, the one used longest ago first. A reader holds what it found
    until it releases it, hangs up or dies.

    Args:
        directory: for the socket; made, with mode 0700, if it is not there. Readers have to be of this user.
        max_bytes: of memory. It takes memory only where it was written.

    Raises:
        InputError: the directory is not this user's alone, or there is no such memory.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        base = private_directory(directory, "directory")
        self._memory = SharedMemoryTransport(max_bytes, kept_bytes=max_bytes)
        self.owner = self._memory.owner
        self._entries = Entries()
        self._counts = dict.fromkeys(("puts", "hits", "misses", "evictions", "refusals"), 0)
        self._lock = threading.Lock()
        self._put_lock = threading.Lock()
        self._codec: Codec[FromReader] = Codec(FromReader)
        self._connections: dict[int, _Connection] = {}
        self._is_closed = False
        try:
            self.path = socket_path(base, f"{self.owner}{SUFFIX}", "directory")
            self._listener = _listen(self.path)
        except BaseException:
            self._memory.close()
            raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="fxsplit-store", daemon=True)
        self._thread.start()

    # --- what its own process does

    def put(
        self, key: bytes, buffers: Mapping[str, Tensor], meta: Mapping[str, object] | None = None
    ) -> bool:
        """Offer a feature. Whether it is offered: one of the same key is left as it is.

        Returns:
            False where it does not fit beside those that readers hold; nothing was given up for it then.

        Raises:
            InputError: it never fits, or cannot be handed over.
            TransportError: the store is closed.
        """
        with self._put_lock:
            with self._lock:
                if key in self._entries:
                    self._entries.touch(key)
                    return True
            handle = self._make(key, buffers, meta)
            if handle is None:
                with self._lock:
                    self._counts["refusals"] += 1
                return False
            with self._lock:
                self._counts["puts"] += 1
                self._entries.add(key, handle, SharedMemoryTransport.size_of(buffers))
        return True

    def _make(
        self, key: bytes, buffers: Mapping[str, Tensor], meta: Mapping[str, object] | None
    ) -> Handle | None:
        while True:
            try:
                handle = self._memory.put(key, buffers, meta)
            except TransportFullError:
                if not self._give_up_one(SharedMemoryTransport.size_of(buffers)):
                    return None
                continue
            if len(self._codec.encode(Answer(handle, 0))) > _MOST_META_BYTES:
                self._memory.release(handle)
                raise InputError(f"meta: expected at most {_MOST_META_BYTES} bytes of metadata")
            return handle

    def _give_up_one(self, num_bytes: int) -> bool:
        """Whether a feature was given up, so that trying again makes sense."""
        with self._lock:
            unused = self._memory.max_bytes - self._memory.held_bytes
            if unused + self._entries.free_bytes < num_bytes:
                return False
            handle = self._entries.give_up()
            self._counts["evictions"] += handle is not None
        if handle is None:
            return False
        self._memory.release(handle)
        return True

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._entries

    def stats(self) -> StoreStats:
        """What it has now, and what was counted."""
        with self._lock:
            return StoreStats(
                num_features=len(self._entries),
                num_held=self._entries.num_held,
                num_readers=len(self._connections),
                held_bytes=self._memory.held_bytes,
                **self._counts,
            )

    # --- what readers ask, on a thread of its own

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake:
                    return
                if descriptor == self._listener.fileno():
                    self._accept(poll)
                elif not self._answer(self._connections[descriptor]):
                    self._drop(poll, descriptor)

    def _accept(self, poll: select.poll) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            time.sleep(_BREATH_SECONDS)  # it hung up already, or there are no descriptors left
            return
        accepted.settimeout(_SEND_SECONDS)
        message, descriptors = self._memory.greeting()
        try:
            if _user_of(accepted) != os.getuid():
                raise PermissionError("a reader of another user")
            socket.send_fds(accepted, [self._codec.encode(message)], descriptors)
        except OSError:
            accepted.close()
            return
        with self._lock:
            self._connections[accepted.fileno()] = _Connection(accepted)
        poll.register(accepted, select.POLLIN)

    def _answer(self, connection: _Connection) -> bool:
        """Whether the reader goes on."""
        try:
            data = connection.socket.recv(MOST_PACKET_BYTES, socket.MSG_DONTWAIT)
            message = self._codec.decode(data)
            if isinstance(message, Find):
                connection.socket.send(self._codec.encode(self._find(message.key, connection)))
        except BlockingIOError:
            return True
        except (OSError, TransportError):
            return False
        with self._lock:
            if isinstance(message, Introduction):
                connection.introduction = message
            elif isinstance(message, Released):
                for number in message.numbers:
                    self._entries.release(number, connection)
        return True

    def _find(self, key: bytes, connection: _Connection) -> Answer:
        with self._lock:
            handle = self._entries.hold(key, connection)
            self._counts["misses" if handle is None else "hits"] += 1
            asker = connection.introduction
            others = [other.introduction for other in self._connections.values()]
            mapping = [o for o in others if o and asker and o.is_mapping and o.group == asker.group]
        return Answer(handle, len(mapping))

    def _drop(self, poll: select.poll, descriptor: int) -> None:
        poll.unregister(descriptor)
        with self._lock:
            connection = self._connections.pop(descriptor)
            self._entries.drop_holder(connection)
        connection.socket.close()

    def close(self) -> None:
        """Take the socket away and give the memory back, once no reader has it mapped; idempotent."""
        with self._put_lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.path.unlink(missing_ok=True)
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()
        self._listener.close()
        os.close(self._wake)
        self._memory.close()


def _listen(path: Path) -> socket.socket:
    """A socket that can be connected to from the moment that its path is there."""
    hidden = path.with_name(f".{path.stem}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(hidden))
        listener.listen()
        hidden.rename(path)
    except OSError as error:
        listener.close()
        hidden.unlink(missing_ok=True)
        raise InputError(f"directory: no socket can be made at {path}: {error}") from error
    listener.setblocking(False)
    return listener


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)

"""Directories that belong to one user alone, for sockets."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import shutil
import signal
import stat
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from fxsplit_encoder.connector.processes import program as launching
from fxsplit_encoder.connector.processes.messages import (
    ControlServer,
    Encoded,
    Failed,
    FromEncoder,
    Hello,
    Started,
    Stop,
    ToEncoder,
    from_wire,
)
from fxsplit_encoder.connector.processes.program import ProcessOptions
from fxsplit_encoder.connector.transport.shared_memory import SharedMemoryTransport
from fxsplit_encoder.connector.transport.wire import Codec, Message, connected_sockets
from fxsplit_encoder.errors import EncoderLostError, InputError, TransportError

_MOST_SOCKET_PATH = 100
"""Linux has room for 107 characters."""


def default_root() -> Path:
    """`$XDG_RUNTIME_DIR`, where there is one; else the directory of temporary files."""
    root = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(root if root and os.access(root, os.W_OK | os.X_OK) else tempfile.gettempdir())


def private_directory(path: Path, setting: str) -> Path:
    """Make a directory of mode 0700, or take one that is there.

    Raises:
        InputError: it cannot be made, or what has its name is not this user's alone.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        state = path.lstat()
    except OSError as error:
        raise InputError(f"{setting}: {path} cannot be made: {error}") from error
    # Whoever may write to what it lies in may have made it first, to read along or to lead elsewhere.
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
        raise InputError(
            f"{setting}: expected {path} to be a directory of this user alone (mode 0700); "
            "remove it, or name another"
        )
    return path


def socket_path(directory: Path, name: str, setting: str) -> Path:
    """The path of a socket in a directory; raises InputError where it is longer than a socket's may be."""
    path = directory / name
    if len(os.fsencode(path)) > _MOST_SOCKET_PATH:
        raise InputError(f"{setting}: {path} is too long for a socket; name a directory with a shorter path")
    return path


_NAME = "fxsplit-encoder"
_SETTING = "runtime_directory"


class RuntimeDirectory:
    """A new directory of mode 0700 inside one of this user's, locked for as long as this process lives.

    The lock tells others that its owner is alive, whatever process ids their container gives them. Those that
    nobody holds a lock on are left by processes that were killed, and are removed here.

    Args:
        root: in which this user's directory is made. None: `default_root()`.

    Raises:
        InputError: the root cannot be used, or what has the directory's name is not this user's alone.
    """

    def __init__(self, root: Path | None = None) -> None:
        base = private_directory((root or default_root()) / f"{_NAME}-{os.getuid()}", _SETTING)
        reap(base)
        self.path, self._lock = _new_locked(base)
        self._finalizer = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def socket_path(self, name: str) -> Path:
        """The path of a socket; raises InputError where it is longer than a socket's may be."""
        return socket_path(self.path, name, _SETTING)

    def close(self) -> None:
        """Remove it; idempotent."""
        self._finalizer()


def _new_locked(base: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(dir=base))
        lock = _lock(path)
        if lock is not None:
            return path, lock


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock of a directory; None: another holds it, or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == os.stat(path, follow_symlinks=False).st_ino:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def reap(base: Path) -> int:
    """Remove the directories of processes that are gone; returns how many."""
    count = 0
    for path in base.iterdir():
        lock = _lock(path)
        if lock is not None:
            _remove(path, lock, os.getpid())
            count += 1
    return count


def _remove(path: Path, lock: int, pid: int) -> None:
    if os.getpid() != pid:  # a fork's copy: the directory is its parent's
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


logger = logging.getLogger(__name__)

_LAST_WORDS_MS = 20
"""How long messages that a process sent before it ended may take to arrive."""

_END_SECONDS = 1.0
"""How long after a process has closed its socket its end is waited for."""

Replies = queue.SimpleQueue[FromEncoder | EncoderLostError]


class EncoderProcess:
    """A process that encodes, and the thread of this one that listens to it.

    The thread sends what others queue, hands replies to whoever waits for them, and learns of the process's
    end from the kernel, not from a time that ran out.

    Args:
        options: how it is started, bounded and ended.
        on_loss: called once if the process ends, or has to be ended, without `close`.

    Raises:
        InputError: the process cannot be started with these options.
    """

    def __init__(self, options: ProcessOptions, on_loss: Callable[[], None]) -> None:
        self._options = options
        self._on_loss = on_loss
        self._is_closing = False
        self._codec: Codec[ToEncoder] = Codec(ToEncoder)
        self._outgoing: deque[bytes] = deque()
        self._replies: dict[int, Replies] = {}
        self._reason = ""
        self._lost = ""
        self._lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._ended = threading.Event()
        with contextlib.ExitStack() as resources:
            self._open(resources)
            self._resources = resources.pop_all()
        self._thread = threading.Thread(target=self._listen, name="fxsplit-encoder-process", daemon=True)
        self._thread.start()

    def _open(self, resources: contextlib.ExitStack) -> None:
        options = self._options
        self._connection, theirs = connected_sockets()
        # Closed after the transport, whose thread waits at it.
        resources.callback(self._connection.close)
        resources.callback(theirs.close)
        self.transport = SharedMemoryTransport(
            options.max_bytes, kept_bytes=options.kept_bytes, checksums=options.checksums
        )
        resources.callback(self.transport.close)
        directory = RuntimeDirectory(options.runtime_directory)
        resources.callback(directory.close)
        path = directory.socket_path("control")
        self._control: ControlServer[FromEncoder] = ControlServer(path, Codec(FromEncoder))
        resources.callback(self._control.close)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        resources.callback(os.close, self._wake)
        with theirs:
            arguments = options.command_line(path, theirs.fileno())
            self._process = launching.launch(arguments, theirs.fileno(), options)
        resources.callback(self._end)
        self._pidfd = os.pidfd_open(self._process.pid)
        resources.callback(os.close, self._pidfd)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it may still answer."""
        return not self._lost

    # --- asking

    def connect(self) -> None:
        """Exchange memories with the process, as soon as it has started.

        Raises:
            EncoderLostError: it ended before.
            TransportError: it is late, or of another version.
        """
        try:
            self.transport.connect(self._connection, self._options.start_timeout)
        except TransportError:
            if self._ended.wait(_END_SECONDS):  # which says more than that it hung up
                raise EncoderLostError(self._lost) from None
            raise
        self._control.identity = self.transport.peer_owner.encode()
        os.eventfd_write(self._wake, 1)

    @contextlib.contextmanager
    def asking(self, number: int) -> Iterator[Replies]:
        """The queue in which the replies to a request arrive.

        Raises:
            EncoderLostError: the process is gone.
        """
        replies: Replies = queue.SimpleQueue()
        with self._lock:
            self.check_alive()
            self._replies[number] = replies
        try:
            yield replies
        finally:
            with self._lock:
                del self._replies[number]
            while not replies.empty():
                self._discard(replies.get())

    def check_alive(self) -> None:
        """Raises EncoderLostError if the process is gone."""
        if self._lost:
            raise EncoderLostError(self._lost)

    def send(self, message: Message) -> None:
        """Queue a message for the process."""
        self._outgoing.append(self._codec.encode(message))
        os.eventfd_write(self._wake, 1)

    def next_reply(self, replies: Replies, timeout: float | None) -> Hello | Started | Encoded:
        """The next reply in a queue.

        Raises:
            EncoderLostError: the process ended, or did not answer within `timeout` seconds and was killed.
            Exception: what failed in the process, of its own class.
        """
        try:
            reply = replies.get(timeout=timeout)
        except queue.Empty:
            self.kill(f"the encoder process {self.pid} did not answer within {timeout:g} s")
            reply = replies.get()
        if isinstance(reply, EncoderLostError):
            raise reply
        if isinstance(reply, Failed):
            raise from_wire(reply.error, self.pid)
        return reply

    # --- the thread

    def _listen(self) -> None:
        try:
            self._serve()
        except TransportError as error:
            self.kill(f"the encoder process {self.pid} sent what nobody understands: {error}")
        except Exception as error:  # of this end: a process that nobody listens to is of no use
            logger.warning("the thread that listens to an encoder process ends", exc_info=True)
            self.kill(f"the encoder process {self.pid} could not be listened to: {error}")
        finally:
            self._lose()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._pidfd, zmq.POLLIN)
        while True:
            events = dict(poller.poll())
            if self._wake in events:
                os.eventfd_read(self._wake)
                if self._control.identity:  # before, its messages could not be told from others
                    poller.register(self._control.socket, zmq.POLLIN)
                self._flush()
            if self._control.socket in events:
                self._read(timeout_ms=0)
            if self._pidfd in events:
                self._read(_LAST_WORDS_MS)
                return

    def _flush(self) -> None:
        while self._outgoing:
            self._control.send(self._outgoing.popleft())

    def _read(self, timeout_ms: int) -> None:
        while (message := self._control.receive(timeout_ms)) is not None:
            number = message.request if isinstance(message, Encoded | Failed) else 0
            with self._lock:
                replies = self._replies.get(number)
                if replies is not None:
                    replies.put(message)
            if replies is None:
                self._discard(message)

    def _discard(self, message: FromEncoder | EncoderLostError) -> None:
        """Release the features of a reply that nobody waits for."""
        if isinstance(message, Encoded):
            for feature in message.features:
                self.transport.release(feature.feature)

    def _lose(self) -> None:
        status = self._process.wait()
        with self._lock:
            if not self._is_closing:
                self._on_loss()
            self._lost = self._reason or f"the encoder process {self.pid} {_end_of(status)}"
            for replies in self._replies.values():
                replies.put(EncoderLostError(self._lost))
        self.transport.refuse()  # which wakes those that wait for room
        self._ended.set()

    # --- the end

    def kill(self, reason: str) -> None:
        """End the process at once."""
        self._reason = self._reason or reason
        self._process.kill()

    def _end(self) -> None:
        """Leave no process behind; one that has ended was waited for."""
        if not self._ended.is_set():
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Ask the process to end, end it if it does not, and give back what belonged to it; idempotent."""
        with self._lock:
            self._is_closing = True
        with self._close_lock:
            self._reason = self._reason or f"the encoder process {self.pid} was closed"
            if not self._ended.is_set():
                self._ask_to_end()
            if not self._ended.wait(self._options.close_timeout):
                self._process.kill()
            self._thread.join()
            self._resources.close()

    def _ask_to_end(self) -> None:
        if self._control.identity:
            self.send(Stop())
        else:
            self._process.terminate()  # it cannot be spoken to yet


def _end_of(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"

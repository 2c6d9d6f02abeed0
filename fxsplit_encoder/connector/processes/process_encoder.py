"""An encoder in a process of its own, as its parent has it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from fxsplit_encoder.connector.interfaces import FeatureEncoder, Modality, PreparedItem
from fxsplit_encoder.connector.processes import program as launching
from fxsplit_encoder.connector.processes.program import EncoderProgram, ProcessOptions
from fxsplit_encoder.connector.processes.wire import (
    START,
    Block,
    Channel,
    Encode,
    Encoded,
    Failed,
    FromEncoder,
    Half,
    Message,
    Release,
    SharedMemory,
    Start,
    Started,
    Stop,
    WireItem,
    from_wire,
    lay_out,
)
from fxsplit_encoder.errors import EncoderLostError, InputError, TransportError

logger = logging.getLogger(__name__)

_END_SECONDS = 1.0
"""How long after a process has closed its socket its end is waited for."""

Replies = queue.SimpleQueue[Started | Encoded | Failed | EncoderLostError]


class EncoderProcess:
    """A process that encodes, and the thread of this one that listens to it.

    The thread hands replies to their requests, and learns of the process's end from the kernel, not
    from a time that ran out. It calls `on_loss` once if that comes without `close`.
    """

    def __init__(self, options: ProcessOptions, on_loss: Callable[[], None]) -> None:
        self._options = options
        self._on_loss = on_loss
        self._is_closing = False
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
        self.memory = SharedMemory(options.max_bytes)
        resources.callback(self.memory.close)
        self.half = Half(self.memory, 0)
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        resources.callback(connection.close)
        with theirs:
            descriptors = [theirs.fileno(), self.memory.descriptor]
            self._process = launching.launch(options.command_line(*descriptors), descriptors, options)
        resources.callback(self._end)
        pidfd = os.pidfd_open(self._process.pid)
        resources.callback(os.close, pidfd)
        self._channel: Channel[FromEncoder] = Channel(connection, pidfd, FromEncoder)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it may still answer."""
        return not self._lost

    # --- asking

    @contextlib.contextmanager
    def asking(self, number: int) -> Iterator[Replies]:
        """The queue in which the replies to a request arrive; EncoderLostError: the process is gone."""
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
        """Send a message, or end the process if it does not read it; InputError for what none may hold."""
        data = self._channel.encode(message)
        try:
            self._channel.send(data)
        except OSError as error:  # if it has ended, that is known and told as the reason
            if not self._ended.wait(_END_SECONDS):
                self.kill(f"the encoder process {self.pid} does not read what it is sent: {error}")

    def next_reply(self, replies: Replies, timeout: float | None) -> Started | Encoded:
        """The next reply in a queue; raises what failed in the process, of its own class. EncoderLostError:
        the process ended, or did not answer within `timeout` seconds and was killed.
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
            while (message := self._channel.receive()) is not None:
                self._take(message)
        except TransportError as error:
            self.kill(f"the encoder process {self.pid} sent what nobody understands: {error}")
        except Exception as error:  # of this end: a process that nobody listens to is of no use
            logger.warning("the thread that listens to an encoder process ends", exc_info=True)
            self.kill(f"the encoder process {self.pid} could not be listened to: {error}")
        finally:
            self._lose()

    def _take(self, message: FromEncoder) -> None:
        if isinstance(message, Release):
            self.half.release(message.number)
            return
        number = START if isinstance(message, Started) else message.request
        with self._lock:
            replies = self._replies.get(number)
            if replies is not None:
                replies.put(message)
        if replies is None:
            self._discard(message)

    def _discard(self, message: Started | Encoded | Failed | EncoderLostError) -> None:
        """Release the features of a reply whose request is over."""
        if isinstance(message, Encoded):
            for block in message.features.values():
                self.send(Release(block.number))

    def _lose(self) -> None:
        self._process.kill()  # one that has hung up is of no use
        status = self._process.wait()
        with self._lock:
            if not self._is_closing:
                self._on_loss()
            self._lost = self._reason or f"the encoder process {self.pid} {_end_of(status)}"
            for replies in self._replies.values():
                replies.put(EncoderLostError(self._lost))
        self.half.close()  # which wakes those that wait for room
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
                self.send(Stop())
            if not self._ended.wait(self._options.close_timeout):
                self._process.kill()
            self._thread.join()
            self._resources.close()


def _end_of(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


T = TypeVar("T")

_PATIENCE = 1e6
"""Seconds. Room comes free as the process encodes; if it ends, whoever waits is woken."""


class ProcessEncoder(FeatureEncoder):
    """Encodes in a process that it starts, bounds and ends.

    Inputs and features cross in anonymous shared memory of `options.max_bytes` each way. Inputs that do not
    fit at once are encoded in several batches, one after another. Unlike a `FeatureEncoder` in general its
    methods may be called from several threads: while the process encodes one batch, the next is copied.

    The process's end is noticed at once: calls of `encode` that wait raise `EncoderLostError`, as does every
    later one until `start` has started another process. Errors in the process keep their class.

    Args:
        program: which encoder.
        options: of the process.
        row_bytes: bytes of a feature's row by modality, where they are asked for before `start`.
    """

    def __init__(
        self,
        program: EncoderProgram,
        options: ProcessOptions | None = None,
        row_bytes: Mapping[Modality, int] | None = None,
    ) -> None:
        self.program = program
        self.options = options if options is not None else ProcessOptions()
        self._declared_row_bytes = dict(row_bytes) if row_bytes is not None else None
        self._row_bytes = self._declared_row_bytes
        self._process: EncoderProcess | None = None
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._numbers = itertools.count(START + 1)
        self._start_lock = threading.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether there is a process that may be asked to encode."""
        return self._process is not None and self._process.is_alive

    @property
    def pid(self) -> int | None:
        """The process's id, if there is one."""
        return self._process.pid if self._process is not None else None

    # --- starting and ending

    def start(self) -> None:
        """Start a process and its encoder; if one is alive, this does nothing.

        Raises:
            InputError: the program or the options are wrong.
            EncoderLostError: the process ended, or was not ready in time.
            Exception: what the program raised, of its own class.
        """
        with self._start_lock:
            if self.is_alive:
                return
            self._close_process()
            self._process = process = EncoderProcess(self.options, lambda: self._count(losses=1))
            try:
                self._row_bytes = self._begin(process)
            except BaseException:
                self._close_process()
                raise
            self._count(starts=1)

    def _begin(self, process: EncoderProcess) -> dict[Modality, int]:
        program, timeout = self.program, self.options.start_timeout
        with process.asking(START) as replies:
            process.send(Start(program.factory, dict(program.arguments)))
            started = _expect(process.next_reply(replies, timeout), Started)
        declared = self._declared_row_bytes
        if declared is not None and declared != started.row_bytes:
            raise InputError(f"row_bytes: expected the encoder's {started.row_bytes}; got {declared}")
        return started.row_bytes

    def close(self) -> None:
        """End the process and give back everything; idempotent, and `start` may follow.

        It may be called from another thread than `encode` or `start`, which then raise `EncoderLostError`.
        """
        process = self._process
        if process is not None:
            process.close()

    def _close_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    # --- encoding

    def row_bytes(self, modality: Modality) -> int | None:
        """See `FeatureEncoder`; InputError: it was not declared, and no encoder was started."""
        if self._row_bytes is None:
            raise InputError("row_bytes: known once the encoder was started; declare it, or call start first")
        return self._row_bytes.get(modality)

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        """Features (rows, width), one per item and in order, in host memory of their own.

        Raises:
            EncoderLostError: the process is gone, or hung; `start` begins another.
            InputError: an item's inputs cannot be sent, or do not fit into `max_bytes`; nothing was.
            Exception: what the encoder raised, of its own class.
        """
        process = self._process
        if process is None:
            raise EncoderLostError("no encoder process was started; call start")
        process.check_alive()
        sizes = [lay_out(item.inputs)[1] for item in items]
        turns = list(_turns(sizes, process.memory.half_bytes))
        if len(turns) > 1:
            self._count(splits=1)
        features = [feature for turn in turns for feature in self._encode_turn(process, items[turn])]
        self._count(batches=len(turns))
        return features

    def _encode_turn(self, process: EncoderProcess, items: Sequence[PreparedItem]) -> list[Tensor]:
        number = next(self._numbers)
        features: dict[int, Tensor] = {}
        with process.asking(number) as replies:
            inputs = self._put(process, items)
            wire = [WireItem(i.modality, i.digest, i.num_tokens, dict(i.metadata)) for i in items]
            try:
                process.send(Encode(number, wire, inputs))
            except InputError:  # of its metadata
                process.half.release(inputs.number)
                raise
            is_last = False
            while not is_last:
                reply = _expect(process.next_reply(replies, self.options.encode_timeout), Encoded)
                self._read(process, reply, features)
                is_last = reply.is_last
        if features.keys() != set(range(len(items))):
            raise _distrust(process, f"{len(features)} features of {len(items)} items")
        return [features[index] for index in range(len(items))]

    def _put(self, process: EncoderProcess, items: Sequence[PreparedItem]) -> Block:
        buffers = {
            f"{i}/{name}": tensor for i, item in enumerate(items) for name, tensor in item.inputs.items()
        }
        try:
            return process.half.put(buffers, timeout=_PATIENCE)
        except TransportError:
            process.check_alive()
            raise

    def _read(self, process: EncoderProcess, reply: Encoded, features: dict[int, Tensor]) -> None:
        """Copy the features of a reply, and let the process have their memory again."""
        for index, block in reply.features.items():
            try:
                features[index] = process.memory.read(1, block)["feature"].clone()
            except (TransportError, KeyError) as error:
                raise _distrust(process, str(error)) from error
            process.send(Release(block.number))

    def stats(self) -> dict[str, int]:
        """Counts over all processes of this encoder: starts, losses, batches, splits (calls whose inputs did
        not fit at once); and bytes of shared memory now: held by inputs, resident.
        """
        process = self._process
        with self._counts_lock:
            counts = {name: self._counts[name] for name in ("starts", "losses", "batches", "splits")}
        counts["held_bytes"] = process.half.held_bytes if process is not None else 0
        counts["resident_bytes"] = process.memory.resident_bytes if process is not None else 0
        return counts

    def _count(self, **counts: int) -> None:
        with self._counts_lock:
            self._counts.update(counts)


def _turns(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Runs of items whose inputs fit into memory together; InputError, before any: one does not alone."""
    if sizes and max(sizes) > most:
        raise InputError(
            f"items: expected inputs of at most max_bytes={most} an item; got {max(sizes)} bytes"
        )
    start = held = 0
    for index, size in enumerate(sizes):
        if held + size > most:
            yield slice(start, index)
            start, held = index, 0
        held += size
    if len(sizes) > start:
        yield slice(start, len(sizes))


def _expect(reply: Started | Encoded, kind: type[T]) -> T:
    if not isinstance(reply, kind):
        raise TransportError(f"expected {kind.__name__} of the encoder process; got {type(reply).__name__}")
    return reply


def _distrust(process: EncoderProcess, what: str) -> EncoderLostError:
    """The error for a process that does not keep to the protocol. It is ended."""
    reason = f"the encoder process {process.pid} answered what was not asked: {what}"
    process.kill(reason)
    return EncoderLostError(reason)

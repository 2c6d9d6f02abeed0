"""An encoder in a process of its own, as its parent has it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fxsplit_encoder.connector.interfaces import FeatureEncoder, Modality, PreparedItem
from fxsplit_encoder.connector.processes import program as launching
from fxsplit_encoder.connector.processes.program import EncoderProgram, ProcessOptions
from fxsplit_encoder.connector.processes.wire import (
    Channel,
    Encode,
    Encoded,
    Failed,
    FromEncoder,
    Message,
    SharedMemory,
    Start,
    Started,
    from_wire,
)
from fxsplit_encoder.errors import EncoderLostError, InputError, TransportError
from fxsplit_encoder.messages import name_of, shown

_END_SECONDS = 1.0
"""How long the end of a process is waited for that has closed its socket."""


class EncoderProcess:
    """A process that encodes, asked for one thing at a time; calls `on_loss` if it ends without `close`."""

    def __init__(self, options: ProcessOptions, on_loss: Callable[[], None]) -> None:
        self._options = options
        self._on_loss = on_loss
        self.turn = threading.Lock()
        """Held by who asks, from the first message to the last answer."""
        self._is_asked = False
        """Whether an answer was not read yet."""
        self._lock = threading.Lock()
        self._reason = ""
        """Why it does not answer any more."""
        self._is_closed = False
        with contextlib.ExitStack() as resources:
            self._make(resources)
            self._resources = resources.pop_all()

    def _make(self, resources: contextlib.ExitStack) -> None:
        options = self._options
        self.memory = SharedMemory(options.max_bytes)
        resources.callback(self.memory.close)
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        resources.callback(connection.close)
        with theirs:
            self._process = launching.launch(theirs.fileno(), self.memory.descriptor, options)
        resources.callback(self._end)
        self._pidfd = os.pidfd_open(self._process.pid)
        resources.callback(os.close, self._pidfd)
        self.channel: Channel[FromEncoder] = Channel(
            connection, self._pidfd, FromEncoder, self.memory, half=0
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it may still answer."""
        return not self._reason and not self._has_ended(0.0)

    def _has_ended(self, seconds: float) -> bool:
        poll = select.poll()  # an object of which one thread alone may ask
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(1e3 * seconds))

    # --- asking, by who has the turn

    def begin(self) -> None:
        """Wait for the answers to a caller that was interrupted; EncoderLostError: the process is gone."""
        if not self.is_alive:
            raise self.lose()
        if self._is_asked:
            self._receive(self._options.encode_timeout)

    def ask(self, message: Message, timeout: float | None) -> Started | Encoded:
        """Ask, and return the answer or raise the error of the process; InputError: no message may hold this;
        EncoderLostError: the process ended, or did not answer within so many seconds and was killed.
        """
        self._send(message)
        reply = self._receive(timeout)
        if isinstance(reply, Failed):
            raise from_wire(reply.error, self.pid)
        return reply

    def _send(self, message: Message) -> None:
        data = self.channel.encode(message)
        self._is_asked = True
        try:
            self.channel.send(data)
        except OSError as error:
            if not self._has_ended(_END_SECONDS):
                reason = f"the encoder process {self.pid} does not read what it is sent: {error}"
                raise self.lose(reason) from error
            raise self.lose() from error

    def _receive(self, timeout: float | None) -> FromEncoder:
        try:
            reply = self.channel.receive(timeout)
        except TimeoutError:
            raise self.lose(f"the encoder process {self.pid} did not answer within {timeout:g} s") from None
        except TransportError as error:
            message = f"the encoder process {self.pid} sent what nobody understands: {error}"
            raise self.lose(message) from error
        if reply is None:
            raise self.lose()
        self._is_asked = False
        return reply

    # --- the end

    def lose(self, reason: str = "") -> EncoderLostError:
        """End the process, which is of no use any more; the error that says why."""
        if not (reason or self._reason):
            self._has_ended(_END_SECONDS)  # by itself, with a status of its own
        with self._lock:
            self._process.kill()
            status = self._process.wait()
            if not self._reason:
                self._reason = reason or f"the encoder process {self.pid} {_end_of(status)}"
                self._on_loss()
            return EncoderLostError(self._reason)

    def _end(self) -> None:
        with self._lock:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Ask the process to end, end it if it does not, and give back what belonged to it; idempotent."""
        if not self._reason and self._has_ended(0.0):
            self.lose()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._reason = self._reason or f"the encoder process {self.pid} was closed"
        self.channel.hang_up()
        if not self._has_ended(self._options.close_timeout):
            self._process.kill()
        with self.turn:  # once who waits for an answer has seen the end
            self._resources.close()


def _end_of(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


class ProcessEncoder(FeatureEncoder):
    """Encodes in a process that it starts, bounds and ends; threads that call `encode` take turns.

    Inputs and features cross in anonymous shared memory of `options.max_bytes` each way; a batch that does
    not fit fails, and a connector halves it. The process's end is noticed at once: a call of `encode` that
    waits raises `EncoderLostError`, as does every later one until another `start`.

    Args:
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
        self._counts = Counter(starts=0, losses=0, batches=0)
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
            self.close()
            self._process = process = EncoderProcess(self.options, lambda: self._counts.update(losses=1))
            with contextlib.ExitStack() as undoing:
                undoing.callback(self._forget, process)
                self._row_bytes = self._begin(process)
                undoing.pop_all()
            self._counts["starts"] += 1

    def _forget(self, process: EncoderProcess) -> None:
        process.close()
        self._process = None

    def _begin(self, process: EncoderProcess) -> dict[Modality, int]:
        message = Start(self.program.factory, dict(self.program.arguments))
        with process.turn:
            started = process.ask(message, self.options.start_timeout)
        if not isinstance(started, Started):
            raise process.lose(f"the encoder process {process.pid} answered what was not asked")
        declared = self._declared_row_bytes
        if declared is not None and declared != started.row_bytes:
            raise InputError(f"row_bytes: expected the encoder's {started.row_bytes}; got {declared}")
        return started.row_bytes

    def close(self) -> None:
        """End the process and give back everything; idempotent, and `start` may follow. Where another thread
        is inside `encode` or `start`, these raise `EncoderLostError`.
        """
        process = self._process
        if process is not None:
            process.close()

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
            InputError: inputs cannot be sent, or inputs or features do not fit into `max_bytes`.
            Exception: what the encoder raised, of its own class.
        """
        process = self._process
        if process is None:
            raise EncoderLostError("no encoder process was started; call start")
        _check_inputs(items)
        with process.turn:
            process.begin()
            reply = process.ask(Encode(list(items)), self.options.encode_timeout)
            if not isinstance(reply, Encoded) or len(reply.features) != len(items):
                asked = f"asked to encode {len(items)} items"
                raise process.lose(f"the encoder process {process.pid} answered what was not asked: {asked}")
            self._counts["batches"] += 1
            return [feature.clone() for feature in reply.features]

    def stats(self) -> dict[str, int]:
        """Counts of starts, losses and batches; resident bytes of shared memory now."""
        process = self._process
        resident = process.memory.resident_bytes if process is not None else 0
        return {**self._counts, "resident_bytes": resident}


def _check_inputs(items: Sequence[PreparedItem]) -> None:
    """Raise InputError where the inputs of an item are no tensors."""
    for item in items:
        for name, tensor in item.inputs.items():
            if not isinstance(tensor, Tensor):
                raise InputError(f"inputs.{name_of(name)}: expected a tensor; got {shown(tensor)}")

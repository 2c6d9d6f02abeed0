"""An encoder in a process of its own, as its parent has it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from fxsplit_encoder.child_process import start_module
from fxsplit_encoder.connector.interfaces import FeatureEncoder, Modality, PreparedItem
from fxsplit_encoder.connector.processes.wire import (
    Channel,
    Encode,
    Encoded,
    EncoderProgram,
    Failed,
    FromEncoder,
    Message,
    SharedMemory,
    Started,
    from_wire,
    has_ended,
)
from fxsplit_encoder.errors import EncoderLostError, InputError, TransportError

_NOT_STARTED = "no encoder process was started; call start"

_END_SECONDS = 1.0
"""How long the end of a process is waited for that has closed its socket."""

T = TypeVar("T", Started, Encoded)

_MODULE = "fxsplit_encoder.connector.processes.child"


@dataclass(frozen=True)
class ProcessOptions:
    """How encoder processes are started, bounded and ended."""

    max_bytes: int = 1 << 30
    """Of shared memory in each direction: inputs that wait for the encoder, features that wait to be read."""
    start_timeout: float = 1800.0
    """Seconds until the encoder is ready: it loads, compiles and captures."""
    encode_timeout: float | None = None
    """Seconds that one batch may take before the process is taken for hung, and killed. None: any."""
    close_timeout: float = 10.0
    """Seconds that the process has to end by itself before it is killed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the process has besides this one's, such as CUDA_VISIBLE_DEVICES."""


class ProcessEncoder(FeatureEncoder):
    """Encodes in a process that it starts, bounds and ends.

    Inputs and features cross in anonymous shared memory of `options.max_bytes` each way; a batch that does
    not fit fails, and a connector halves it. The process's end is noticed at once, by the kernel's word: a
    call of `encode` that waits raises `EncoderLostError`, as does every later one until another `start`.

    Args:
        row_bytes: bytes of a feature's row by modality, for which a connector asks before any start.
    """

    def __init__(
        self,
        program: EncoderProgram,
        row_bytes: Mapping[Modality, int],
        options: ProcessOptions | None = None,
    ) -> None:
        self.program = program
        self._row_bytes = dict(row_bytes)
        self.options = options if options is not None else ProcessOptions()
        self.pid: int | None = None
        """The id of the last process; None: none was started."""
        self._reason = _NOT_STARTED
        """Why nothing can be encoded, if so."""
        self._is_asked = False
        """Whether an answer was not read yet."""
        self._resources = contextlib.ExitStack()

    @property
    def is_alive(self) -> bool:
        """Whether there is a process that may be asked to encode."""
        return not self._reason and not has_ended(self._pidfd, 0.0)

    # --- starting and ending

    def start(self) -> None:
        """Start a process and its encoder; if one is alive, this does nothing.

        Raises:
            InputError: the program or the options are wrong.
            EncoderLostError: the process ended, or was not ready in time.
            Exception: what the program raised, of its own class.
        """
        if self.is_alive:
            return
        self.close()
        with contextlib.ExitStack() as resources:
            self._launch(resources)
            started = self._ask(self.program, Started, self.options.start_timeout)
            if self._row_bytes != started.row_bytes:
                expected = f"the encoder's {started.row_bytes}"
                raise InputError(f"row_bytes: expected {expected}; got {self._row_bytes}")
            self._resources = resources.pop_all()

    def _launch(self, resources: contextlib.ExitStack) -> None:
        memory = SharedMemory(self.options.max_bytes)
        resources.callback(memory.close)
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        resources.callback(connection.close)
        with theirs:
            self._process = launch(theirs.fileno(), memory.descriptor, self.options)
        resources.callback(self._end)
        self.pid, self._reason, self._is_asked = self._process.pid, "", False
        self._pidfd = os.pidfd_open(self.pid)
        resources.callback(os.close, self._pidfd)
        self._channel: Channel[FromEncoder] = Channel(connection, self._pidfd, FromEncoder, memory, half=0)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reason = _NOT_STARTED

    def _lose(self, reason: str = "") -> EncoderLostError:
        """End the process, which is of no use any more; the error that says why."""
        if not reason:
            has_ended(self._pidfd, _END_SECONDS)  # by itself, with a status of its own
        self._process.kill()
        self._reason = reason or f"the encoder process {self.pid} {_end_of(self._process.wait())}"
        return EncoderLostError(self._reason)

    def close(self) -> None:
        """Ask the process to end, or end it, and give back everything; idempotent, and `start` may follow."""
        if not self._reason:
            self._channel.close()
            has_ended(self._pidfd, self.options.close_timeout)
        self._resources.close()

    # --- encoding

    def row_bytes(self, modality: Modality) -> int | None:
        """See `FeatureEncoder`; as declared."""
        return self._row_bytes.get(modality)

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        """Features (rows, width), one per item and in order, in host memory of their own.

        Raises:
            EncoderLostError: the process is gone, or hung; `start` begins another.
            InputError: inputs cannot be sent, or inputs or features do not fit into `max_bytes`.
            Exception: what the encoder raised, of its own class.
        """
        if self._reason:
            raise EncoderLostError(self._reason)
        if self._is_asked:  # by a caller that was interrupted
            self._receive(self.options.encode_timeout)
        reply = self._ask(Encode(list(items)), Encoded, self.options.encode_timeout)
        if len(reply.features) != len(items):
            raise InputError(f"{len(reply.features)} features of {len(items)} items")
        return [feature.clone() for feature in reply.features]

    def _ask(self, message: Message, kind: type[T], timeout: float | None) -> T:
        """Ask, and return the answer or raise the error of the process; InputError: no message may hold this;
        EncoderLostError: the process ended, or did not answer within so many seconds and was killed.
        """
        data = self._channel.encode(message)
        self._is_asked = True
        try:
            self._channel.send(data)
        except OSError as error:
            raise self._lose() from error
        reply = self._receive(timeout)
        if isinstance(reply, Failed):
            raise from_wire(reply, self._process.pid)
        if not isinstance(reply, kind):
            raise self._lose(f"the encoder process {self.pid} answered what was not asked")
        return reply

    def _receive(self, timeout: float | None) -> FromEncoder:
        try:
            reply = self._channel.receive(timeout)
        except TimeoutError:
            raise self._lose(f"the encoder process {self.pid} did not answer within {timeout:g} s") from None
        except TransportError as error:
            message = f"the encoder process {self.pid} sent an invalid message: {error}"
            raise self._lose(message) from error
        if reply is None:
            raise self._lose()
        self._is_asked = False
        return reply


def launch(connection: int, memory: int, options: ProcessOptions) -> subprocess.Popen[str]:
    """Start an encoder process, which inherits two descriptors; InputError: it cannot be started."""
    arguments = [str(number) for number in (connection, memory, os.getpid(), options.max_bytes)]
    given = {"pass_fds": (connection, memory), "stdin": subprocess.DEVNULL}
    try:
        return start_module(_MODULE, arguments, options.environment, **given)
    except OSError as error:
        raise InputError(f"{sys.executable} cannot be started: {error}") from error


def _end_of(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"

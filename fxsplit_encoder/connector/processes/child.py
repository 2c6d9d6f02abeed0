"""The program of an encoder process: its main thread encodes one batch after another, until its parent is
done; another ends this process at once when the parent has ended.
"""

from __future__ import annotations

import copy
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn, get_args

from torch import Tensor

from fxsplit_encoder.connector.interfaces import FATAL, FeatureEncoder, Modality, PreparedItem
from fxsplit_encoder.connector.processes.program import EncoderProgram
from fxsplit_encoder.connector.processes.wire import (
    Channel,
    Encoded,
    Failed,
    Message,
    SharedMemory,
    Start,
    Started,
    ToEncoder,
    to_wire,
)
from fxsplit_encoder.errors import InputError, TransportError
from fxsplit_encoder.messages import shown

EXIT_PARENT_GONE = 3


class EncoderHost:
    """Serves one parent."""

    def __init__(self, channel: Channel[ToEncoder]) -> None:
        self._channel = channel
        self._encoder: FeatureEncoder | None = None

    def serve(self) -> None:
        """Do what is asked until the parent hangs up."""
        try:
            while (message := self._channel.receive()) is not None and self._do(message):
                pass
        finally:
            if self._encoder is not None:
                self._encoder.close()

    def _send(self, message: Message) -> None:
        self._channel.send(self._channel.encode(message))

    def _do(self, message: ToEncoder) -> bool:
        """Whether the process is of further use."""
        try:
            if isinstance(message, Start):
                self._start(message)
            else:
                self._send(Encoded(self._encode(message.items)))
        except Exception as error:
            self._send(Failed(to_wire(error)))
            return not isinstance(message, Start) and not isinstance(error, FATAL)
        return True

    def _start(self, message: Start) -> None:
        # An encoder may keep its arguments, and later messages have tensors where these lie.
        program = EncoderProgram(message.factory, copy.deepcopy(message.arguments))
        encoder = program.resolve()(**program.arguments)
        if not isinstance(encoder, FeatureEncoder):
            raise InputError(f"factory: {program.factory} returned no FeatureEncoder but {type(encoder)}")
        self._encoder = encoder
        encoder.start()
        modalities: tuple[Modality, ...] = get_args(Modality)
        sizes = {modality: encoder.row_bytes(modality) for modality in modalities}
        self._send(Started({name: size for name, size in sizes.items() if size is not None}))

    def _encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        if self._encoder is None:
            raise TransportError("asked to encode before the encoder was started")
        features = self._encoder.encode(items)
        if len(features) != len(items):
            raise InputError(f"{len(features)} features of {len(items)} items")
        for feature in features:
            if not isinstance(feature, Tensor):
                raise InputError(f"feature: expected a tensor; got {shown(feature)}")
        return features


def main(arguments: Sequence[str]) -> int:
    """Run an encoder process, with the arguments of `program.launch`."""
    descriptor, memory_descriptor, parent_pid, max_bytes = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and decides
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        _end()
    if os.getppid() != parent_pid:
        _end()
    threading.Thread(target=_end_with, args=(parent,), name="fxsplit-parent", daemon=True).start()
    memory = SharedMemory(max_bytes, memory_descriptor)
    connection = socket.socket(fileno=descriptor)
    channel: Channel[ToEncoder] = Channel(connection, parent, ToEncoder, memory, half=1)
    EncoderHost(channel).serve()
    return 0


def _end_with(process: int) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.poll()
    _end()


def _end() -> NoReturn:
    os._exit(EXIT_PARENT_GONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

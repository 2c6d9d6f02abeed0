"""Inside an encoder process: it encodes what it is sent, one batch after another, until its parent is done.

The main thread does all work, so that an encoder captures and replays on one thread. Two others wait for the
parent's end, one at the socket and one for the process, and end this one at once.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, get_args

import torch
from torch import Tensor

from fxsplit_encoder.connector.interfaces import FeatureEncoder, Modality, PreparedItem
from fxsplit_encoder.connector.processes.messages import (
    START,
    ControlClient,
    Encode,
    Encoded,
    Failed,
    Hello,
    Start,
    Started,
    Stop,
    ToEncoder,
    WireFeature,
    to_wire,
)
from fxsplit_encoder.connector.processes.program import EncoderProgram
from fxsplit_encoder.connector.transport.layout import from_plain
from fxsplit_encoder.connector.transport.shared_memory import SharedMemoryTransport
from fxsplit_encoder.connector.transport.wire import Codec
from fxsplit_encoder.errors import EncoderLostError, InputError, TransportError, TransportFullError
from fxsplit_encoder.version import VERSION

EXIT_PARENT_GONE = 3
_GREETING_SECONDS = 60.0
_LINGER_MS = 2000
_PATIENCE = 1e6
"""Seconds. The parent frees room as it reads, or ends this process."""

# After these a device's context is of no use: the process has to be another.
_FATAL = (EncoderLostError, torch.AcceleratorError)


class EncoderHost:
    """Serves one parent."""

    def __init__(self, control: ControlClient[ToEncoder], transport: SharedMemoryTransport) -> None:
        self._control = control
        self._transport = transport
        self._encoder: FeatureEncoder | None = None

    def serve(self) -> None:
        """Greet, then do what is asked until asked to stop."""
        self._control.send(Hello(os.getpid(), VERSION, str(torch.__version__)))
        try:
            while not isinstance(message := self._control.receive(), Stop):
                if not self._do(message):
                    break
        finally:
            if self._encoder is not None:
                self._encoder.close()

    def _do(self, message: Start | Encode) -> bool:
        """Whether the process is of further use."""
        try:
            if isinstance(message, Start):
                self._start(EncoderProgram(message.factory, from_plain(message.arguments)))
            else:
                self._encode(message)
        except Exception as error:
            request = START if isinstance(message, Start) else message.request
            self._control.send(Failed(request, to_wire(error)))
            return request != START and not isinstance(error, _FATAL)
        return True

    def _start(self, program: EncoderProgram) -> None:
        encoder = program.resolve()(**program.arguments)
        if not all(hasattr(encoder, name) for name in ("start", "encode", "row_bytes", "close")):
            raise InputError(f"factory: {program.factory} returned no FeatureEncoder but {type(encoder)}")
        self._encoder = encoder
        encoder.start()
        modalities: tuple[Modality, ...] = get_args(Modality)
        sizes = {modality: encoder.row_bytes(modality) for modality in modalities}
        known = {name: size for name, size in sizes.items() if size is not None}
        self._control.send(Started(known))

    def _encode(self, message: Encode) -> None:
        if self._encoder is None:
            raise TransportError("asked to encode before the encoder was started")
        try:
            features = self._encoder.encode(self._items(message))
            if len(features) != len(message.items):
                raise InputError(f"{len(features)} features of {len(message.items)} items")
            self._deliver(message.request, features)
        finally:
            self._transport.release(message.inputs)

    def _items(self, message: Encode) -> list[PreparedItem]:
        """The items of a batch. Their inputs lie where the parent put them."""
        buffers, meta = self._transport.view(message.inputs)
        inputs: list[dict[str, Tensor]] = [{} for _ in message.items]
        for path, tensor in buffers.items():
            index, _, name = path.partition("/")
            inputs[int(index)][name] = tensor
        return [
            PreparedItem(item.modality, item.digest, own, item.num_tokens, metadata)
            for item, own, metadata in zip(message.items, inputs, meta["items"], strict=True)
        ]

    def _deliver(self, request: int, features: Sequence[Tensor]) -> None:
        """Send features, in several messages where there is no room for all of them at once."""
        waiting: list[WireFeature] = []
        try:
            for index, feature in enumerate(features):
                try:
                    handle = self._transport.put(b"", {"feature": feature})
                except TransportFullError:
                    self._control.send(Encoded(request, waiting, is_last=False))
                    waiting = []
                    handle = self._transport.put(b"", {"feature": feature}, timeout=_PATIENCE)
                waiting.append(WireFeature(index, handle))
        except Exception:
            for sent in waiting:
                self._transport.release(sent.feature)
            raise
        self._control.send(Encoded(request, waiting, is_last=True))


def main(arguments: Sequence[str]) -> int:
    """Run an encoder process.

    Args:
        arguments: `--control PATH --descriptor FD --parent PID --max-bytes N --kept-bytes N
            [--checksums]`.
    """
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and decides
    _end_with(options.parent)
    transport = SharedMemoryTransport(
        options.max_bytes, kept_bytes=options.kept_bytes, checksums=options.checksums, on_hang_up=_end
    )
    transport.connect(socket.socket(fileno=options.descriptor), _GREETING_SECONDS)
    control = ControlClient(options.control, transport.owner.encode(), Codec[ToEncoder](ToEncoder))
    try:
        EncoderHost(control, transport).serve()
    finally:
        control.close(_LINGER_MS)
        transport.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fxsplit encoder process")
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--descriptor", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--max-bytes", type=int, required=True)
    parser.add_argument("--kept-bytes", type=int, required=True)
    parser.add_argument("--checksums", action="store_true")
    return parser


def _end_with(parent: int) -> None:
    """End this process with its parent, whoever else has inherited the parent's end of the socket."""
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        _end()
    if os.getppid() != parent:
        _end()
    threading.Thread(target=_wait_for, args=(descriptor,), name="fxsplit-parent", daemon=True).start()


def _wait_for(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    _end()


def _end() -> NoReturn:
    os._exit(EXIT_PARENT_GONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

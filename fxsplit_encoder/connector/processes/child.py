"""Inside an encoder process: it encodes what it is sent, one batch after another, until its parent is done.

The main thread does all work, so that an encoder captures and replays on one thread. Another reads messages,
and ends this process at once when the parent has ended.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn, get_args

import torch
from torch import Tensor

from fxsplit_encoder.connector.interfaces import FeatureEncoder, Modality, PreparedItem
from fxsplit_encoder.connector.processes.program import EncoderProgram
from fxsplit_encoder.connector.processes.wire import (
    START,
    Block,
    Channel,
    Encode,
    Encoded,
    Failed,
    Half,
    Message,
    Release,
    SharedMemory,
    Start,
    Started,
    Stop,
    ToEncoder,
    to_wire,
)
from fxsplit_encoder.errors import EncoderLostError, InputError, TransportError, TransportFullError

EXIT_PARENT_GONE = 3
_PATIENCE = 1e6
"""Seconds. The parent frees room as it reads, or ends this process."""

# After these a device's context is of no use: the process has to be another.
_FATAL = (EncoderLostError, torch.AcceleratorError)


class EncoderHost:
    """Serves one parent, whose half of the memory is the first."""

    def __init__(self, channel: Channel[ToEncoder], memory: SharedMemory) -> None:
        self._channel = channel
        self._memory = memory
        self._half = Half(memory, 1)
        self._encoder: FeatureEncoder | None = None
        self._asked: queue.SimpleQueue[Start | Encode | Stop] = queue.SimpleQueue()

    def serve(self) -> None:
        """Do what is asked until asked to stop."""
        threading.Thread(target=self._listen, name="fxsplit-parent", daemon=True).start()
        try:
            while not isinstance(message := self._asked.get(), Stop):
                if not self._do(message):
                    break
        finally:
            if self._encoder is not None:
                self._encoder.close()

    def _listen(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                if isinstance(message, Release):
                    self._half.release(message.number)
                else:
                    self._asked.put(message)
        finally:
            _end()

    def _send(self, message: Message) -> None:
        self._channel.send(self._channel.encode(message))

    def _do(self, message: Start | Encode) -> bool:
        """Whether the process is of further use."""
        try:
            if isinstance(message, Start):
                self._start(message)
            else:
                self._encode(message)
        except Exception as error:
            request = START if isinstance(message, Start) else message.request
            self._send(Failed(request, to_wire(error)))
            return request != START and not isinstance(error, _FATAL)
        return True

    def _start(self, message: Start) -> None:
        program = EncoderProgram(message.factory, message.arguments)
        encoder = program.resolve()(**program.arguments)
        if not isinstance(encoder, FeatureEncoder):
            raise InputError(f"factory: {program.factory} returned no FeatureEncoder but {type(encoder)}")
        self._encoder = encoder
        encoder.start()
        modalities: tuple[Modality, ...] = get_args(Modality)
        sizes = {modality: encoder.row_bytes(modality) for modality in modalities}
        self._send(Started({name: size for name, size in sizes.items() if size is not None}))

    def _encode(self, message: Encode) -> None:
        if self._encoder is None:
            raise TransportError("asked to encode before the encoder was started")
        try:
            features = self._encoder.encode(self._items(message))
            if len(features) != len(message.items):
                raise InputError(f"{len(features)} features of {len(message.items)} items")
            self._deliver(message.request, features)
        finally:
            self._send(Release(message.inputs.number))

    def _items(self, message: Encode) -> list[PreparedItem]:
        """The items of a batch. Their inputs lie where the parent put them."""
        inputs: list[dict[str, Tensor]] = [{} for _ in message.items]
        for path, tensor in self._memory.read(0, message.inputs).items():
            index, _, name = path.partition("/")
            inputs[int(index)][name] = tensor
        return [
            PreparedItem(item.modality, item.digest, own, item.num_tokens, item.metadata)
            for item, own in zip(message.items, inputs, strict=True)
        ]

    def _deliver(self, request: int, features: Sequence[Tensor]) -> None:
        """Send features, in several messages where there is no room for all of them at once."""
        waiting: dict[int, Block] = {}
        try:
            for index, feature in enumerate(features):
                try:
                    block = self._half.put({"feature": feature})
                except TransportFullError:
                    self._send(Encoded(request, waiting, is_last=False))
                    waiting = {}
                    block = self._half.put({"feature": feature}, timeout=_PATIENCE)
                waiting[index] = block
        except Exception:
            for block in waiting.values():
                self._half.release(block.number)
            raise
        self._send(Encoded(request, waiting, is_last=True))


def main(arguments: Sequence[str]) -> int:
    """Run an encoder process, with the arguments of `ProcessOptions.command_line`."""
    parser = argparse.ArgumentParser(prog="fxsplit encoder process")
    for name in ("--socket", "--memory", "--parent", "--max-bytes"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and decides
    try:
        parent = os.pidfd_open(options.parent)
    except ProcessLookupError:
        _end()
    if os.getppid() != options.parent:
        _end()
    memory = SharedMemory(options.max_bytes, options.memory)
    channel: Channel[ToEncoder] = Channel(socket.socket(fileno=options.socket), parent, ToEncoder)
    EncoderHost(channel, memory).serve()
    return 0


def _end() -> NoReturn:
    os._exit(EXIT_PARENT_GONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

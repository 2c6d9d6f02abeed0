"""The program of an encoder process: its main thread encodes one batch after another, until its parent is
done; another ends this process at once when the parent has ended.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from torch import Tensor

from fxsplit_encoder.connector.interfaces import MODALITIES, FeatureEncoder, PreparedItem
from fxsplit_encoder.connector.processes.wire import (
    Channel,
    Encoded,
    EncoderProgram,
    SharedMemory,
    Started,
    ToEncoder,
    has_ended,
    to_wire,
)
from fxsplit_encoder.encode_queue.batch_thread import BatchThread
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import shown

EXIT_PARENT_GONE = 3


def serve(channel: Channel[ToEncoder]) -> None:
    """Do what one parent asks, until it hangs up or the encoder is of no further use."""
    encoder: FeatureEncoder | None = None
    with contextlib.ExitStack() as closing:
        while (asked := channel.receive()) is not None:
            try:
                if isinstance(asked, EncoderProgram):
                    encoder = _made(asked)
                    closing.callback(encoder.close)
                    encoder.start()
                    sizes = {modality: encoder.row_bytes(modality) for modality in MODALITIES}
                    data = channel.encode(Started({m: size for m, size in sizes.items() if size is not None}))
                else:
                    data = channel.encode(Encoded(_encoded(encoder, asked.items)))
            except Exception as error:
                channel.send(channel.encode(to_wire(error)))
                if isinstance(asked, EncoderProgram) or isinstance(error, BatchThread.FATAL):
                    return
            else:
                channel.send(data)


def _made(program: EncoderProgram) -> FeatureEncoder:
    # An encoder may keep its arguments, and later messages have tensors where these lie.
    encoder = program.resolve()(**copy.deepcopy(program.arguments))
    if not isinstance(encoder, FeatureEncoder):
        raise InputError(f"factory: {program.factory} returned no FeatureEncoder but {type(encoder)}")
    return encoder


def _encoded(encoder: FeatureEncoder | None, items: Sequence[PreparedItem]) -> list[Tensor]:
    assert encoder is not None  # a parent asks for it first
    features = encoder.encode(items)
    for feature in features:
        if not isinstance(feature, Tensor):
            raise InputError(f"feature: expected a tensor; got {shown(feature)}")
    return features


def main(arguments: Sequence[str]) -> int:
    """Run an encoder process, with the arguments of `process_encoder.launch`."""
    descriptor, memory_descriptor, parent_pid, max_bytes = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and decides
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        return EXIT_PARENT_GONE
    if os.getppid() != parent_pid:
        return EXIT_PARENT_GONE
    threading.Thread(target=_end_with, args=(parent,), name="fxsplit-parent", daemon=True).start()
    memory = SharedMemory(max_bytes, memory_descriptor)
    connection = socket.socket(fileno=descriptor)
    channel: Channel[ToEncoder] = Channel(connection, parent, ToEncoder, memory, half=1)
    with contextlib.suppress(BrokenPipeError):  # the parent has closed, and reads no answer any more
        serve(channel)
    return 0


def _end_with(process: int) -> None:
    has_ended(process)
    os._exit(EXIT_PARENT_GONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

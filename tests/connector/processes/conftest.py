"""Encoder processes for tests: forked, since importing torch takes seconds, and looked for afterwards."""

from __future__ import annotations

import gc
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from fxsplit_encoder.connector.interfaces import Modality, PreparedItem
from fxsplit_encoder.connector.processes import (
    EncoderProgram,
    ProcessEncoder,
    ProcessOptions,
    child,
    process_encoder,
)
from tests.connector.resources import nothing_left


class ForkedProcess:
    """What `subprocess.Popen` offers, of a fork."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)


def fork(
    connection: int, memory: int, options: ProcessOptions, main: Callable[[Sequence[str]], int] = child.main
) -> ForkedProcess:
    """Takes the place of `process_encoder.launch`."""
    arguments = [str(number) for number in (connection, memory, os.getpid(), options.max_bytes)]
    pid = quiet_fork()
    if pid == 0:
        run_child(arguments, {connection, memory}, options, main)
    return ForkedProcess(pid)


def quiet_fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        return os.fork()


def run_child(
    arguments: Sequence[str],
    descriptors: set[int],
    options: ProcessOptions,
    main: Callable[[Sequence[str]], int],
) -> None:
    status = 1
    try:
        gc.disable()  # objects of the test process must not close descriptors that are others' here
        low, high = sorted(descriptors)
        os.closerange(3, low)
        os.closerange(low + 1, high)
        os.closerange(high + 1, 4096)
        os.environ.update(options.environment)
        torch.set_num_threads(1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        status = main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


ROWS: dict[Modality, int] = {"image": 32, "video": 32}
DOUBLING = EncoderProgram("tests.connector.processes.encoders:doubling")


def make_item(rows: int = 3, **metadata: Any) -> PreparedItem:
    return PreparedItem("image", os.urandom(32), {"pixel_values": torch.randn(rows, 8)}, rows, metadata)


@pytest.fixture
def make_encoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ProcessEncoder]]:
    monkeypatch.setattr(process_encoder, "launch", fork)
    made: list[ProcessEncoder] = []

    def make(start: bool = True, of: EncoderProgram = DOUBLING, **options: Any) -> ProcessEncoder:
        settings = ProcessOptions(**{"max_bytes": 1 << 20, **options})
        encoder = ProcessEncoder(of, ROWS, settings)
        made.append(encoder)
        if start:
            encoder.start()
        return encoder

    with nothing_left():
        yield make
        for encoder in made:
            encoder.close()

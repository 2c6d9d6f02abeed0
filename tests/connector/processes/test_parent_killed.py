"""A process whose parent was killed ends by itself, whatever it was doing, and takes everything with it."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from fxsplit_encoder.connector.processes import EncoderProgram, ProcessEncoder, ProcessOptions, program
from fxsplit_encoder.connector.processes.encoder_process import RuntimeDirectory
from tests.connector.resources import nothing_left

from .conftest import DOUBLING, make_item
from .forked import fork, quiet_fork


def idle(encoder: ProcessEncoder, tell: Callable[[], None]) -> None:
    encoder.start()
    encoder.encode([make_item()])
    tell()
    signal.pause()


def encoding(encoder: ProcessEncoder, tell: Callable[[], None]) -> None:
    encoder.start()
    tell()
    encoder.encode([make_item(do="sleep", seconds=600)])


def starting(encoder: ProcessEncoder, tell: Callable[[], None]) -> None:
    encoder.program = EncoderProgram(DOUBLING.factory, {"start_seconds": 600.0})
    launch = program.launch

    def told(*arguments: object) -> object:
        process = launch(*arguments)  # type: ignore[arg-type]
        encoder.told = process.pid  # type: ignore[attr-defined]
        tell()
        return process

    program.launch = told  # type: ignore[assignment]
    encoder.start()


class Family(NamedTuple):
    parent: int
    child: int
    child_pidfd: int


@contextmanager
def a_family(do: Callable[[ProcessEncoder, Callable[[], None]], None], path: Path) -> Iterator[Family]:
    """A parent that does something with an encoder process of its own; both are forks of this one."""
    reading, writing = os.pipe()
    parent = quiet_fork()
    if parent == 0:
        try:
            program.launch = fork  # type: ignore[assignment]
            encoder = ProcessEncoder(DOUBLING, ProcessOptions(max_bytes=1 << 20, runtime_directory=path))
            do(encoder, lambda: os.write(writing, str(encoder_pid(encoder)).encode()) and None)
        finally:
            os._exit(1)
    os.close(writing)
    child = int(os.read(reading, 20))
    pidfd = os.pidfd_open(child)
    yield Family(parent, child, pidfd)
    os.close(reading)
    os.close(pidfd)


def encoder_pid(encoder: ProcessEncoder) -> int:
    return encoder.pid or encoder.told  # type: ignore[attr-defined,no-any-return]


def is_over(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


@pytest.mark.parametrize("do", [idle, encoding, starting])
def test_a_process_ends_with_its_parent(
    do: Callable[[ProcessEncoder, Callable[[], None]], None], short_path: Path
) -> None:
    with nothing_left(), a_family(do, short_path) as family:
        assert not is_over(family.child_pidfd, 0.1)
        os.kill(family.parent, signal.SIGKILL)
        os.waitpid(family.parent, 0)
        assert is_over(family.child_pidfd, 60)
    (base,) = short_path.iterdir()
    assert len(list(base.iterdir())) == 1  # of which nobody could have removed it
    RuntimeDirectory(short_path).close()
    assert list(base.iterdir()) == []

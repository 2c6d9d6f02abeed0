"""What this process holds of the system, counted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fxsplit_encoder.connector.transport.arena import NAME


def num_descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def mapped_bytes(pid: int | str = "self") -> int:
    """Of shared memory that transports made."""
    lines = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if f"memfd:{NAME}" in line]
    spans = [line.split()[0].split("-") for line in lines]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether a condition becomes true; other processes take the time that they take."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


@contextmanager
def nothing_left() -> Iterator[None]:
    """Asserts that descriptors, mapped memory and threads are as many after as before."""
    before = num_descriptors(), mapped_bytes(), threading.active_count()
    yield
    assert (num_descriptors(), mapped_bytes(), threading.active_count()) == before

"""What this process holds of the system, counted."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fxsplit_encoder.connector.processes.wire import NAME


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_bytes() -> int:
    """Of shared memory that transports made."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"memfd:{NAME}" in line]
    spans = [line.split()[0].split("-") for line in lines]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def descriptors(but: Sequence[str] = ()) -> Counter[str]:
    """This process's descriptors by what they lead to, but for those that lead to what begins so."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            target = os.readlink(f"/proc/self/fd/{number}")
            found[re.sub(r"\d{2,}", "N", target)] += not target.startswith(tuple(but))
    return +found


@contextmanager
def nothing_left(but: Sequence[str] = ()) -> Iterator[None]:
    """Asserts that no descriptors, mapped memory or threads are there after that were not before. Fewer may
    be: what others left behind may be collected meanwhile.

    Args:
        but: beginnings of what descriptors lead to that are somebody else's, such as a GPU's driver's.
    """
    before = descriptors(but), mapped_bytes(), Counter(thread.name for thread in threading.enumerate())
    yield
    after = descriptors(but), mapped_bytes(), Counter(thread.name for thread in threading.enumerate())
    assert not (left := after[0] - before[0]), f"left open: {left}"
    assert after[1] <= before[1]
    assert not (left := after[2] - before[2]), f"still run: {left}"

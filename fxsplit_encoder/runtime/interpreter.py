"""Python's interpreter, which one thread has at a time: who waits for it how long."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

OFTEN = 5e-5
"""Seconds. Beside a thread that runs Python without a pause, 600 operations of PyTorch took 256 ms by
Python's default of 0.005 and 10 by this; alone 0.7 (on a CPU, torch 2.13)."""

_lock = threading.Lock()
_inside = 0
_before = _ours = 0.0


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """Inside, a thread that wants the interpreter gets it from another one after `OFTEN`, in the whole
    process.

    An operation of PyTorch gives it up and wants it back, and a forward that runs eagerly has hundreds of
    them, so that a request beside long work in Python would wait for it hundreds of times. Whoever sets
    another interval meanwhile keeps it.
    """
    global _inside, _before, _ours
    with _lock:
        if not _inside:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(OFTEN, _before))
            _ours = sys.getswitchinterval()  # rounded
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and sys.getswitchinterval() == _ours:
                sys.setswitchinterval(_before)

"""Python's interpreter, which one thread has at a time: who waits for it how long."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from itertools import repeat
from operator import is_

OFTEN = 5e-5
"""Seconds. Beside a thread that runs Python without a pause, 600 operations of PyTorch took 256 ms by
Python's default of 0.005 and 10 by this; alone 0.7 (on a CPU, torch 2.13)."""

_lock = threading.Lock()
_inside = 0
_before = _ours = 0.0
_collecting = 0
_mark: list[None] | None = None
"""Made right after objects were frozen here, so that it is frozen if somebody else freezes some."""


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


@contextlib.contextmanager
def collecting_what_is_new() -> Iterator[None]:
    """Inside, garbage is looked for among the objects that are made inside alone, in the whole process.

    A full collection looks at every object while all threads wait, 200 ms for half a million (on a CPU, after
    `import transformers`), and who compiles makes so many that there are several. What was there before is
    kept meanwhile, garbage or not. Where somebody has frozen it already, which engines do once they are up,
    nothing is done; nor is undone what somebody freezes meanwhile.
    """
    global _collecting, _mark
    with _lock:
        if not _collecting and not gc.get_freeze_count():
            gc.freeze()
            _mark = []
        _collecting += 1
    try:
        yield
    finally:
        with _lock:
            _collecting -= 1
            if not _collecting and _mark is not None:
                if _is_collected(_mark):
                    gc.unfreeze()
                _mark = None


def _is_collected(item: object) -> bool:
    """Whether collections look at an object: it is not frozen. To count what is frozen, Python walks over all
    of it, 130 ms for 1.3 million objects, and no thread runs meanwhile.
    """
    generations = range(len(gc.get_threshold()))
    return any(any(map(is_, gc.get_objects(generation), repeat(item))) for generation in generations)

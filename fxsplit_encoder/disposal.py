"""Graphs and pools that nobody needs any more, while a thread captures.

Freeing a graph or the memory of a pool is an error on a thread that captures, and costs it the capture. So
whoever owns such things hands them to `dispose` before letting go.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterable, Iterator
from typing import Any

_this_thread = threading.local()


def dispose(resources: Iterable[Any]) -> None:
    """Keeps resources until this thread has left `nothing_is_freed`; does nothing outside of it."""
    parked = getattr(_this_thread, "parked", None)
    if parked is not None:
        parked.extend(resources)


@contextlib.contextmanager
def nothing_is_freed() -> Iterator[None]:
    """Around a capture of this thread. What was disposed of goes at the end of the outermost one.

    Garbage is not collected meanwhile either: graphs of others may be in it.
    """
    if getattr(_this_thread, "parked", None) is not None:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    _this_thread.parked = []
    try:
        yield
    finally:
        _this_thread.parked = None
        if was_enabled:
            gc.enable()

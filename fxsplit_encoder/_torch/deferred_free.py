"""Deferred destruction of graphs and pools while a thread captures.

Freeing a graph or the memory of a pool is an error on a thread that captures, and costs it the capture. So
whoever owns such things hands them to `free_later` before letting go.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterable, Iterator
from typing import Any

_this_thread = threading.local()


def free_later(resources: Iterable[Any]) -> None:
    """Keeps resources until this thread has left `defer_frees`; does nothing outside of it."""
    deferred = getattr(_this_thread, "deferred", None)
    if deferred is not None:
        deferred.extend(resources)


@contextlib.contextmanager
def defer_frees() -> Iterator[None]:
    """Around a capture of this thread. What `free_later` was given is freed at the end of the outermost one.

    Garbage is not collected meanwhile either: graphs of others may be in it.
    """
    if getattr(_this_thread, "deferred", None) is not None:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    _this_thread.deferred = []
    try:
        yield
    finally:
        _this_thread.deferred = None
        if was_enabled:
            gc.enable()

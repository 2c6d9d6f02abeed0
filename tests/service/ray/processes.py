"""The processes of a cluster that this process started."""

from __future__ import annotations

from contextlib import suppress

import psutil


def descendants() -> list[int]:
    """All processes below this one."""
    return [process.pid for process in psutil.Process().children(recursive=True)]


def named(name: str) -> list[int]:
    """Those whose title holds a name."""
    return [pid for pid in descendants() if name in title_of(pid)]


def title_of(pid: int) -> str:
    """What a process calls itself; nothing if it is gone."""
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def private_bytes(pid: int) -> int:
    """What a process holds that no other does; 0 if it is gone."""
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_full_info().uss)
    return 0

"""The processes of a cluster that this process started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def descendants(root: int) -> Iterator[int]:
    """All processes below one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    pending = [root]
    while pending:
        parent = pending.pop()
        children = [pid for pid, above in parents.items() if above == parent]
        yield from children
        pending += children


def named(name: str, root: int | None = None) -> list[int]:
    """Those below a process whose title holds a name."""
    return [pid for pid in descendants(root or os.getpid()) if name in title_of(pid)]


def title_of(pid: int) -> str:
    """What a process calls itself; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def private_bytes(pid: int) -> int:
    """What a process holds that no other does; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))
    )

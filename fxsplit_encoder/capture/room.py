"""How much memory a device has, to refuse what none of it holds before anything is allocated."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

# Where Linux says how much a container may take: of cgroups version 2, and version 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_of(device: torch.device) -> int:
    """Bytes of a device's memory, used or not; of the CPU, what the host allows this process at most."""
    return _memory_of(device)


@functools.cache
def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([host, *(limit for limit in map(_read_limit, _LIMITS) if limit is not None)])


def _read_limit(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def gibibytes(num_bytes: int) -> str:
    """A number of bytes for a message."""
    return f"{num_bytes / 2**30:,.1f} GiB"

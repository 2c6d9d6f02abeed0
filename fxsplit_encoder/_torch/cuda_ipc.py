"""GPU memory that another process of this host has allocated, in this one's address space.

torch shares the memory of CUDA tensors only through pickles of `torch.multiprocessing`. What those hold are
the plain values that these functions hand out and take. torch keeps what was shared until the other process
has given it up, in whichever way its allocator has made it; it counts that in a file of /dev/shm.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Share", "forget", "open_shared", "share"]

_COUNTER = 3
"""The position of the file's name among the values."""

Share = list[bytes | int | bool]
"""Handles and offsets; the device is not one of them, since processes may number devices differently."""


def share(memory: Tensor) -> Share:
    """What another process opens the memory behind a CUDA tensor with; it is to be opened once."""
    _, *values = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return list(values)


def open_shared(values: Share, device: torch.device) -> Tensor:
    """The memory (bytes,) that another process shared, unmapped with the last tensor over it.

    Args:
        values: what `share` gave there.
        device: the same GPU, as this process numbers it.
    """
    with torch.cuda.device(device):
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *values)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def forget(values: Share) -> None:
    """Remove the file in which torch counted what was shared. It removes it itself, unless it is killed.

    Args:
        values: what `share` gave in a process that has ended.
    """
    name = values[_COUNTER] if len(values) > _COUNTER else b""
    if isinstance(name, bytes) and name.startswith(b"/torch_") and name.count(b"/") == 1:
        Path("/dev/shm", name[1:].decode(errors="replace")).unlink(missing_ok=True)

"""Memory of CUDA graphs: pools, clean-up after a failed capture, memory that is not owned, deferred frees."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def memory_pool(device: torch.device) -> torch.cuda.MemPool:
    """Creates a memory pool on a GPU. `MemPool` takes the current one, and holds it there alone."""
    with torch.cuda.device(device):
        return torch.cuda.MemPool()


def end_failed_capture(graph: torch.cuda.CUDAGraph, memory: torch.cuda.MemPool, uses: int) -> None:
    """Resets a graph whose `capture_end` raised, and its pool, whose `use_count` was `uses` before."""
    # Up to torch 2.13 the graph keeps its hold on the pool (https://github.com/pytorch/pytorch/pull/190348).
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # it does not record where only the graph could not be made
        torch._C._cuda_endAllocateToPool(device, memory.id)
    graph.reset()
    if memory.use_count() > uses:
        torch._C._cuda_releasePool(device, memory.id)
    torch.cuda.synchronize(device)


def borrowed(tensor: Tensor) -> Tensor:
    """Returns a tensor over the same memory that does not own it, as every public alias does."""
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


_this_thread = threading.local()


def free_later(resources: Iterable[Any]) -> None:
    """Keeps graphs and pools until this thread leaves `defer_frees`, if inside: a free ends a capture."""
    deferred = getattr(_this_thread, "deferred", None)
    if deferred is not None:
        deferred.extend(resources)


@contextlib.contextmanager
def defer_frees() -> Iterator[None]:
    """Defers frees of `free_later` and garbage collection during a capture of this thread."""
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


def freeze_objects() -> None:
    """Have the garbage collector skip all objects of this moment, for the command that owns the process.

    A full collection among the objects of torch and transformers stops every thread for a third of a second.
    """
    gc.collect()
    gc.freeze()

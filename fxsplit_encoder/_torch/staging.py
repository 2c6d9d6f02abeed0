"""Copies on the host and to a device, and tensors that need to be copied only once.

The calling thread makes small copies alone: OpenMP's threads left the GPU idle for 8 to 18 ms.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# One thread copies that many bytes in about a tenth of a millisecond.
_ONE_THREAD_BYTES = 1 << 20

# torch copies no more than that many elements without asking for OpenMP's threads.
_ONE_THREAD_ELEMENTS = 32_768

# Dtypes that NumPy does not have are copied as integers of their size.
_AS_INTEGERS = {torch.bfloat16: torch.int16}

_IMMUTABLE = "_fxsplit_is_immutable"


def copy_on_host(target: Tensor, source: Tensor) -> Tensor:
    """Does `target.copy_(source)` for tensors of one shape on the CPU; returns the target."""
    if target.nbytes > _ONE_THREAD_BYTES or target.shape != source.shape:
        return target.copy_(source)
    integers = _AS_INTEGERS.get(target.dtype) if target.dtype == source.dtype else None
    if integers is not None:
        np.copyto(target.view(integers).numpy(), source.detach().view(integers).numpy())
    elif target.dtype in _AS_INTEGERS or source.dtype in _AS_INTEGERS:
        target.copy_(source)
    else:
        np.copyto(target.numpy(), source.detach().numpy(), casting="unsafe")
    return target


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the tensor on a device without waiting; one that goes to the host is there on return."""
    if device.type == "cuda" and not tensor.is_cuda and not tensor.is_pinned():
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        tensor = copy_on_host(memory, tensor)
    return tensor.to(device=device, dtype=dtype, non_blocking=device.type != "cpu")


def staged(tensor: Tensor, dtype: torch.dtype, is_pinned: bool) -> Tensor:
    """Returns a host tensor in a dtype, and in pinned memory if asked for, by the calling thread alone."""
    if tensor.is_cuda or (tensor.dtype == dtype and (tensor.is_pinned() or not is_pinned)):
        return tensor
    target = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=is_pinned)
    if tensor.dtype == dtype and dtype not in _AS_INTEGERS:
        np.copyto(target.numpy(), tensor.detach().numpy())
        return target
    flat, source = target.view(-1), tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _ONE_THREAD_ELEMENTS):
        part = slice(start, start + _ONE_THREAD_ELEMENTS)
        flat[part].copy_(source[part])
    return target


def mark_immutable(tensor: Tensor) -> Tensor:
    """Marks a tensor that is never written to again, so that it need not be read twice; returns it."""
    setattr(tensor, _IMMUTABLE, True)
    return tensor


def is_immutable(value: object) -> bool:
    """Whether a tensor was marked as immutable. Others, views of it included, may change."""
    return hasattr(value, _IMMUTABLE)

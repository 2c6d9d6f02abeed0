"""Copies on the host and to a device, and tensors that need to be copied only once.

The calling thread makes small copies alone: OpenMP's threads left the GPU idle for 8 to 18 ms.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# One thread copies that many bytes in about a tenth of a millisecond.
_ONE_THREAD_BYTES = 1 << 20

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


def mark_immutable(tensor: Tensor) -> Tensor:
    """Marks a tensor that is never written to again, so that it need not be read twice; returns it."""
    setattr(tensor, _IMMUTABLE, True)
    return tensor


def is_immutable(value: object) -> bool:
    """Whether a tensor was marked as immutable. Others, views of it included, may change."""
    return hasattr(value, _IMMUTABLE)

"""Tensors in Ray's object store, of any dtype: as their bytes, which Ray neither pickles nor copies twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class HostTensor:
    """A tensor's dtype, shape and bytes. What comes out of the object store is read-only, and lies there for
    as long as it is referred to.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: NDArray[Any]

    @classmethod
    def of(cls, tensor: Tensor) -> HostTensor:
        """Of a tensor on any device; of one in host memory that is contiguous, a view."""
        host = tensor.detach().cpu().contiguous()
        return cls(host.dtype, tuple(host.shape), host.reshape(-1).view(torch.uint8).numpy())

    def copy(self) -> Tensor:
        """The tensor in memory of its own, which may be written to and keeps nothing in the store."""
        made = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        np.copyto(made.reshape(-1).view(torch.uint8).numpy(), self.data)
        return made

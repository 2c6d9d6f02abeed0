"""Pixels of uint8 to the floats of a model's processor, on any device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class PixelValues:
    """Normalizes uint8 pixels on a device, to the very values that the processor computes on the host.

    Args:
        values: (channels, 256), see `ImagePreparer.values`.
        dtype: of the result.
        device: where pixels are.
    """

    def __init__(self, values: NDArray[np.float32], dtype: torch.dtype, device: torch.device) -> None:
        self._channels = len(values)
        self._values = torch.from_numpy(values).flatten().to(device=device, dtype=dtype)
        self._starts = torch.arange(self._channels, dtype=torch.int32, device=device)[:, None] * 256

    def __call__(self, pixels: Tensor) -> Tensor:
        """Pixels of any layout in which the channels come first in each row."""
        if not pixels.shape[0]:
            return self._values.new_empty(pixels.shape)
        entries = pixels.reshape(pixels.shape[0], self._channels, -1).int() + self._starts
        return self._values.index_select(0, entries.flatten()).view(pixels.shape)

"""Prepared images to a batch on the tower's device, and embeddings back, without waiting for the device.

Both ways go through pinned memory. Who keeps two batches under way, one that the device works on and one that
the host fills or empties, keeps both busy: torch takes the same pinned memory again once a batch is through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxsplit_encoder.integrations.images.preparer import Array, PreparedImage
from fxsplit_encoder.towers.inputs import PixelValues


def upload(images: Sequence[PreparedImage], values: PixelValues, device: torch.device) -> dict[str, Any]:
    """The tower's `mm_kwargs` of some images: pixels on the device, grids and counts on the host."""
    return {
        name: _upload([image.inputs[name] for image in images], values, device) for name in images[0].inputs
    }


def _upload(arrays: Sequence[Array], values: PixelValues, device: torch.device) -> Tensor:
    kind = arrays[0].dtype.kind
    if kind not in "fu":
        return torch.from_numpy(np.concatenate(arrays))
    rows = sum(len(array) for array in arrays)
    dtype = torch.uint8 if kind == "u" else torch.float32
    shape = rows, *arrays[0].shape[1:]
    host = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=host.numpy())
    pixels = host.to(device, non_blocking=True)
    return values(pixels) if kind == "u" else pixels


@dataclass(frozen=True)
class Download:
    """Embeddings on their way to the host."""

    rows: Tensor
    """(rows of all images, width), on the host."""
    counts: Sequence[int]
    """Rows of every image."""
    done: torch.cuda.Event | None
    """None: they are there."""

    @classmethod
    def start(cls, embeddings: Sequence[Tensor], dtype: torch.dtype) -> Download:
        """Begins to copy embeddings, (tokens, width) each."""
        joined = torch.cat(list(embeddings)).to(dtype)
        counts = [len(embedding) for embedding in embeddings]
        if not joined.is_cuda:
            return cls(joined, counts, None)
        host = torch.empty(joined.shape, dtype=dtype, device="cpu", pin_memory=True)
        host.copy_(joined, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(joined.device))
        return cls(host, counts, done)

    def wait(self) -> None:
        """Until they are there."""
        if self.done is not None:
            self.done.synchronize()

    def embeddings(self) -> list[Array]:
        """The embedding of every image, (tokens, width), once all of them are there."""
        self.wait()
        return np.split(self.rows.numpy(), np.cumsum(self.counts)[:-1])

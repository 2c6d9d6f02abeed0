"""silu(gate) * up, of one layer whose rows are those of the two in turn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def interleaved(gate: Tensor, up: Tensor, *, rows: int = 0) -> Tensor:
    """The weight or bias of both layers as one: gate, up, gate, up; each with rows of zeros up to `rows`."""
    missing = max(0, rows - gate.shape[0])
    padding = [0, 0] * (gate.dim() - 1) + [0, missing]
    return torch.stack((F.pad(gate, padding), F.pad(up, padding)), dim=1).flatten(0, 1)


def swiglu_of_pairs(values: Tensor) -> Tensor:
    """Of (rows, 2 * features) in the order of `interleaved`, (rows, features)."""
    if values.is_cuda and values.dtype in (torch.bfloat16, torch.float16):
        from fxsplit_encoder.products.swiglu_triton import swiglu_of_pairs as on_device

        result: Tensor = on_device(values)
        return result
    return F.silu(values[..., ::2]) * values[..., 1::2]

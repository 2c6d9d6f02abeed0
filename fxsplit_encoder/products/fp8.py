"""Rows in float8_e4m3fn, each with a scale of its own."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SMALLEST_SCALE = 1e-12
"""A row of zeros has no scale of its own."""


def quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in float8_e4m3fn, and the scale of each row (or output channel) in float32, (rows, 1).

    The scale maps the largest entry of a row to the largest number of the format, 448.
    """
    exact = matrix.float()
    scales = (exact.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp_min(SMALLEST_SCALE)
    return (exact / scales).clamp(-LARGEST, LARGEST).to(FP8), scales

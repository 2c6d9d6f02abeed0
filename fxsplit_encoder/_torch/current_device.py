"""The device that launches go to where nothing says which: torch's current one of this thread."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

ALREADY = contextlib.nullcontext()
"""What `on_device` gives where there is nothing to do."""


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one, if it is a GPU and is not.

    torch's own operators find their device by their tensors. Triton's and other packages' kernels, events and
    the current stream do not: on another device they fail, or time and order what is not there.
    """
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return ALREADY
    return torch.cuda.device(device)


def indexed(device: torch.device) -> torch.device:
    """The device as tensors on it name theirs: "cuda" is the current one now, and stays that."""
    index: int | None = device.index
    if device.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device

"""Tensors that nobody writes to once they are made, so that who has read one need not read it again."""

from __future__ import annotations

from torch import Tensor

_MARK = "_fxsplit_is_constant"


def mark_constant(tensor: Tensor) -> Tensor:
    """Says of a tensor that nobody will write to it; returns it."""
    setattr(tensor, _MARK, True)
    return tensor


def is_constant(value: object) -> bool:
    """Whether that was said of a tensor. Others, views of it too, may change."""
    return hasattr(value, _MARK)

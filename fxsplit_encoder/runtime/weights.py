"""What happens when weights lie elsewhere than where captures read them, whoever runs the captures.

changed in place       captures read the new values; nothing happens
replaced or moved      with the same layout: everything is captured again, with a warning
                       with another layout, or removed: a WeightsLayoutError: nothing was compiled for it
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fxsplit_encoder.errors import WeightsLayoutError

logger = logging.getLogger(__name__)


def layouts_of(values: Iterable[object]) -> list[tuple[Any, ...] | None]:
    """The layouts of weights; None for a value that is no tensor."""
    return [layout(value) if isinstance(value, torch.Tensor) else None for value in values]


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Sizes, strides, dtype and device of a weight."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def check_replacements(
    layouts: Sequence[tuple[Any, ...] | None], values: Sequence[object], what_to_do: str
) -> None:
    """Raises WeightsLayoutError unless new weights have the layouts of those that a program was compiled for.

    Args:
        layouts: of the old weights, None for values that are none.
        values: those in the same places now.
        what_to_do: for the message, a sentence.
    """
    for expected, value in zip(layouts, values, strict=True):
        if expected is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise WeightsLayoutError(
                f"parameters: expected those with which the module was compiled; got {value} in the place of "
                f"one. Put it back, or: {what_to_do}"
            )
        if layout(value) != expected:
            raise WeightsLayoutError(
                "parameters: expected them in the sizes, strides, dtype and device in which the module was "
                f"compiled; got one of {tuple(value.shape)}, strides {value.stride()}, {value.dtype} on "
                f"{value.device} in the place of another. {what_to_do}"
            )


def warn_of_new_captures(reason: object) -> None:
    """Says that everything is captured again."""
    logger.warning("capturing again: %s", reason)

"""What went wrong with an item, and which items of a batch that failed are to blame."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from fxsplit_encoder.errors import (
    CaptureMemoryError,
    ConnectorError,
    EncoderLostError,
    InputError,
    MissingExtraError,
)

logger = logging.getLogger(__name__)

FAILURE_KINDS = (
    "media",
    "too_large",
    "mismatch",
    "encoder",
    "out_of_memory",
    "timeout",
    "worker_lost",
    "closed",
    "full",
)
"""Under which failures are counted: media that cannot be decoded or are beyond a limit; more rows than
memory may hold; rows that are not as many or as wide as announced; an error of the encoder; no memory; too
slow; every worker that tried was lost, or none is left; the connector was closed; too much waited already."""

_NO_MEMORY = (MemoryError, torch.OutOfMemoryError, CaptureMemoryError)
_TO_BLAME = (InputError, ValueError, TypeError, KeyError, IndexError, MissingExtraError)

Item = TypeVar("Item")
Result = TypeVar("Result")


def failure_of(error: BaseException, kind: str) -> ConnectorError:
    """An error as the connector reports it.

    Args:
        error: what was raised.
        kind: what it is, unless memory ran out or a worker was lost.
    """
    if isinstance(error, ConnectorError):
        return error
    if isinstance(error, _NO_MEMORY):
        kind, retryable = "out_of_memory", True
    elif isinstance(error, EncoderLostError):
        kind, retryable = "worker_lost", True
    else:
        retryable = not isinstance(error, _TO_BLAME)
    # Without the error itself: its traceback would keep the frames alive, and the tensors in them.
    logger.info("%s", kind, exc_info=error)
    return ConnectorError(f"{type(error).__name__}: {error}", kind, retryable)


def encode_each(
    encode: Callable[[Sequence[Item]], Sequence[Result]],
    items: Sequence[Item],
    on_split: Callable[[], None] = lambda: None,
) -> list[Result | ConnectorError]:
    """The result of every item, or why it has none: a batch that fails is halved until single items do.

    Args:
        encode: of several items at once.
        items: at least one.
        on_split: called once for every batch that is halved.

    Raises:
        EncoderLostError: from `encode`; no item is to blame.
    """
    try:
        return list(encode(items))
    except EncoderLostError:
        raise
    except Exception as error:
        if len(items) == 1:
            return [failure_of(error, "encoder")]
    on_split()
    middle = len(items) // 2
    return [
        *encode_each(encode, items[:middle], on_split),
        *encode_each(encode, items[middle:], on_split),
    ]

"""The states of an item on its way from media to rows, and the kinds of failures that end it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import torch

from fxsplit_encoder.encode_queue.batch_thread import BatchThread
from fxsplit_encoder.errors import CaptureMemoryError, ConnectorError, InputError, MissingExtraError

Availability = Literal["ready", "deferred", "unavailable"]
"""What an engine is told of a request: merge now, ask again in a later step, or never."""


class State(StrEnum):
    """Of an item of a ticket, and of the feature that it shares with equal items of other tickets; in order,
    from the one that is furthest behind.
    """

    NEW = "new"
    """Known: it is hashed, waits for memory, or is decoded and preprocessed."""

    QUEUED = "queued"
    """Preprocessed, with memory reserved; it waits for an encoder."""

    ENCODING = "encoding"
    """In a batch, or on its way to where it will lie."""

    READY = "ready"
    """Its rows may be read."""

    RELEASED = "released"
    """Nobody of its ticket holds it any more. It may be held again."""

    FAILED = "failed"
    """It will not be encoded; the error says why."""

    CANCELLED = "cancelled"
    """Its ticket does not want it."""


TRANSITIONS: Mapping[State, frozenset[State]] = {
    # Straight on to ENCODING or READY where an equal item is there already.
    State.NEW: frozenset({State.QUEUED, State.ENCODING, State.READY, State.FAILED, State.CANCELLED}),
    # Back to NEW where less is asked of it after memory ran out.
    State.QUEUED: frozenset({State.ENCODING, State.FAILED, State.CANCELLED}),
    # Back to QUEUED for a retry, to NEW where less is asked of it after memory ran out.
    State.ENCODING: frozenset({State.READY, State.QUEUED, State.NEW, State.FAILED, State.CANCELLED}),
    # FAILED only where the device had still to write its rows, and was lost.
    State.READY: frozenset({State.RELEASED, State.CANCELLED, State.FAILED}),
    # Held again: ready where the feature is still kept, else encoded once more.
    State.RELEASED: frozenset({State.NEW, State.QUEUED, State.ENCODING, State.READY, State.CANCELLED}),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}
"""Every change of state that is allowed, for items and for features alike."""

WAITING = frozenset({State.NEW, State.QUEUED, State.ENCODING})
"""The states from which an item may still become ready."""


GONE = frozenset({State.FAILED, State.CANCELLED})
"""The states that an item does not leave."""


class Residence(StrEnum):
    """Where a feature lies."""

    NONE = "none"
    DEVICE = "device"
    """Where its encoder left it."""
    HOST = "host"
    """In a host buffer of the connector, pinned where there is CUDA."""


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


def failure_of(error: BaseException, kind: str) -> ConnectorError:
    """An error as the connector reports it."""
    if isinstance(error, ConnectorError):
        return error
    if isinstance(error, _NO_MEMORY):
        kind, retryable = "out_of_memory", True
    elif isinstance(error, BatchThread.FATAL):
        kind, retryable = "worker_lost", True
    else:
        retryable = not isinstance(error, _TO_BLAME)
    # Without the error itself: its traceback would keep the frames alive, and the tensors in them.
    logger.info("%s", kind, exc_info=error)
    return ConnectorError(f"{type(error).__name__}: {error}", kind, retryable)

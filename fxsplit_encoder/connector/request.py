"""What a caller asks for: the media of one request, and what to do if they cannot be encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fxsplit_encoder.connector.interfaces import MediaItem, Reduction
from fxsplit_encoder.connector.positions import Placeholders
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import shown

Retention = Literal["discard", "keep"]


@dataclass(frozen=True)
class FailurePolicy:
    """What becomes of a request one of whose items cannot be encoded.

    Whatever was asked for, an item whose worker was lost goes to another worker, and a batch that fails is
    halved until only the items that cause it fail.

    Raises:
        InputError: a setting is not one of those below.
    """

    then: Literal["fail", "text_only"] = "fail"
    """fail: the ticket fails. text_only: it becomes ready without any media, which `Ticket.text_only` says
    and new token counts, all 0, announce.
    """

    retries: int = 0
    """How often an item is encoded again after an error that is `retryable`."""

    reduce: Reduction | None = None
    """What is asked of an item instead of failing it when memory runs out, and the retries have: half its
    frames, or half of each side, until it fits or has no more to give. Only before the ticket was ready for
    the first time, since its token counts change."""

    def __post_init__(self) -> None:
        if self.then not in ("fail", "text_only"):
            raise InputError(f"then: expected fail or text_only; got {shown(self.then)}")
        if type(self.retries) is not int or self.retries < 0:
            raise InputError(f"retries: expected an integer of at least 0; got {shown(self.retries)}")
        if self.reduce not in (None, "half_frames", "half_resolution"):
            raise InputError(f"reduce: expected half_frames or half_resolution; got {shown(self.reduce)}")


FAIL = FailurePolicy()
TEXT_ONLY = FailurePolicy(then="text_only")
RETRY = FailurePolicy(retries=2)


@dataclass(frozen=True, eq=False)
class EncodeRequest:
    """The media of one request.

    Raises:
        InputError: the id is empty, the salt no text, or the timeout no positive number.
    """

    id: str
    """The engine's name for the request, for logs. It need not be unique, and is no part of any key."""

    items: Sequence[MediaItem] = ()
    """In the order of their placeholders. An item that the prompt shows twice is listed twice; it is encoded
    once."""

    placeholders: Placeholders | None = None
    """Where the rows of the items go, for `merge`, such as a `PositionMap`; None: the caller places them."""

    failure: FailurePolicy = FAIL

    retention: Retention = "discard"
    """discard: rows are freed once nobody holds them. keep: they stay until memory is needed, for further
    turns, beams, retries or rebuilt prefixes."""

    timeout_s: float | None = None
    """Seconds after which an item that is not ready fails; None: as the connector's settings say."""

    salt: str = ""
    """Features are shared among requests of the same salt only, such as those of one tenant."""

    def __post_init__(self) -> None:
        if not self.id:
            raise InputError("id: expected a name for the request; got an empty one")
        if not _is_text(self.salt):
            raise InputError(f"salt: expected text that UTF-8 can encode; got {shown(self.salt)}")
        if self.retention not in ("discard", "keep"):
            raise InputError(f"retention: expected discard or keep; got {shown(self.retention)}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise InputError(f"timeout_s: expected a positive number or None; got {shown(self.timeout_s)}")


def _is_text(value: object) -> bool:
    """Whether a string has bytes: a lone surrogate, as JSON may bring it, has none."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False

"""What several ask of one request's inputs is read once."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, TypeVar

_Read = TypeVar("_Read")

_known: ContextVar[dict[tuple[int, int], tuple[object, object, Any]] | None] = ContextVar(
    "fxsplit_encoder_read", default=None
)


# Entered for every request: a class takes a third of the time of a generator.
class reading_once:
    """Inside, `read_once` remembers what it read; afterwards inputs may change, so it forgets."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token: Token[Any] = _known.set({})

    def __exit__(self, *raised: object) -> None:
        _known.reset(self._token)


def read_once(reader: object, given: object, read: Callable[[], _Read]) -> _Read:
    """What a reader makes of an object: inside `reading_once` what it made of it the first time."""
    known = _known.get()
    if known is None:
        return read()
    key = (id(reader), id(given))
    if key not in known:
        known[key] = reader, given, read()  # both are kept, so that no other gets their numbers
    result: _Read = known[key][2]
    return result

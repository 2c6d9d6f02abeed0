"""Caches: a dictionary of bounded size, and readings of one request's inputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """A dictionary of at most `most` entries: the one that was set, or got, least recently leaves."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def get(self, key: Any, default: Any = None) -> Any:
        """The value, or the default."""
        if key not in self:
            return default
        self.move_to_end(key)
        return self[key]

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)


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
    """Returns `read()`; inside `reading_once` the result of the first call of this reader for this object."""
    known = _known.get()
    if known is None:
        return read()
    key = (id(reader), id(given))
    if key not in known:
        known[key] = reader, given, read()  # both are kept, so that no other gets their numbers
    result: _Read = known[key][2]
    return result

"""A dictionary of bounded size."""

from __future__ import annotations

from collections import OrderedDict
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

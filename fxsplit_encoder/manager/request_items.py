"""A request's items: their sizes, which are not read again of requests that are known to be alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from fxsplit_encoder.errors import FxSplitError
from fxsplit_encoder.manager.legacy_dual_path import read_item_specs
from fxsplit_encoder.protocol import EncoderItemSpec

# Requests of other items whose sizes are kept. A choice: a service sees few sizes.
_KEPT = 1024


class RequestItems(NamedTuple):
    """The items of one request."""

    specs: list[EncoderItemSpec]
    """Their sizes."""
    described: Hashable | None = None
    """Stands for all that the tower says of them, see `PackedTower.described_items`; None: nothing does."""


class ItemReader:
    """Reads the items of a tower's requests. Threads may share it."""

    def __init__(self, tower: Any) -> None:
        self._tower = tower
        self._described_items: Callable[[dict[str, Any]], Hashable | None] | None = getattr(
            tower, "described_items", None
        )
        self._known: dict[Hashable, RequestItems] = {}

    def read(self, mm_kwargs: Any) -> RequestItems:
        """The items of a request.

        Raises:
            InputError: as `read_item_specs`.
        """
        described = None if self._described_items is None else self._describe(mm_kwargs)
        if described is None:
            return RequestItems(read_item_specs(self._tower, mm_kwargs))
        items = self._known.get(described)
        if items is None:
            items = RequestItems(read_item_specs(self._tower, mm_kwargs), described)
            if len(self._known) >= _KEPT:
                self._known = {}
            self._known[described] = items
        return items

    def _describe(self, mm_kwargs: Any) -> Hashable | None:
        assert self._described_items is not None
        if type(mm_kwargs) is not dict or not mm_kwargs:
            return None
        try:
            return self._described_items(mm_kwargs)
        except FxSplitError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return None  # whoever reads the items says what is wrong with them

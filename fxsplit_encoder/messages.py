"""Values in messages: shortened, and never an error of their own."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

_MOST_ENTRIES = 8
_LONGEST_NAME = 80

# From this many bits on an integer is told by its size: Python refuses to write out the longest.
_MOST_BITS = 256


class _Short(reprlib.Repr):
    """`repr` of bounded length for any value, without the data of tensors and arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = _MOST_ENTRIES
        self.maxstring = self.maxother = 120

    def repr1(self, x: Any, level: int) -> str:
        kind = type(x)
        try:
            if isinstance(x, int) and x.bit_length() > _MOST_BITS:
                return f"an integer of {x.bit_length()} bits"
            if isinstance(x, str | bytes | bytearray):
                return self.repr_str(x, level)  # type: ignore[arg-type]
            # By attributes: this module knows neither torch nor NumPy. A scalar of NumPy is a number.
            if all(hasattr(kind, name) for name in ("shape", "dtype", "ndim", "__setitem__")):
                return f"{kind.__name__} of {tuple(x.shape)} {x.dtype}"
            if kind.__module__ == "builtins":
                return super().repr1(x, level)
            if hasattr(kind, "__len__") and len(x) > _MOST_ENTRIES:
                return f"{kind.__name__} of {len(x)} entries"
        except (AttributeError, RuntimeError, TypeError, ValueError):  # of the object's own shape or length
            return f"an object of {kind.__name__}"
        shown = self.repr_instance(x, level)
        # For an object whose `repr` raises, the base class shows an address.
        return f"an object of {kind.__name__}" if shown.endswith(f" instance at {id(x):#x}>") else shown


_short = _Short()


def shown(value: object) -> str:
    """A value as a message shows it: like `repr`, but short whatever the value is."""
    return _short.repr(value)


def name_of(value: object) -> str:
    """A name as it is, if it is a short one."""
    return value if isinstance(value, str) and len(value) <= _LONGEST_NAME else shown(value)


def names_of(values: Iterable[object]) -> str:
    """The first of some names, separated by commas; "nothing" if there are none."""
    names = [name_of(value) for value in islice(values, _MOST_ENTRIES + 1)]
    return ", ".join([*names[:_MOST_ENTRIES], *(["..."] if len(names) > _MOST_ENTRIES else [])]) or "nothing"


def nearest(name: str, allowed: Sequence[str]) -> str:
    """Asks in a message whether the allowed name nearest to `name` was meant; "" if none is near."""
    near = difflib.get_close_matches(name, allowed, n=1)
    return f"did you mean {near[0]}? " if near else ""

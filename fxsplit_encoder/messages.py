"""Values in messages: shortened, and never an error of their own."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

_MOST_CHARACTERS = 120
_MOST_ENTRIES = 8
_DEEPEST = 2
_LONGEST_NAME = 80

# From this many bits on an integer is told by its size: Python refuses to write out the longest.
_MOST_BITS = 256

_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}


def shown(value: object, depth: int = 0) -> str:
    """A value as a message shows it: like `repr`, but short whatever the value is, and without its data where
    that is a tensor or an array.

    Args:
        value: what was got.
        depth: how many containers it is in.
    """
    kind = type(value)
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes | bytearray):
        return _cut(repr(value[: _MOST_CHARACTERS + 1]))
    if kind in _BRACKETS:
        left, right = _BRACKETS[kind]
        inside = _entries(value, lambda entry: shown(entry, depth + 1), depth)  # type: ignore[arg-type]
        return f"{left}{inside}{',' if kind is tuple and len(value) == 1 else ''}{right}"  # type: ignore[arg-type]
    if isinstance(value, dict):
        pairs = _entries(value.items(), lambda pair: _pair(pair, depth), depth)
        return f"{{{pairs}}}"
    if _is_array(value):
        return f"{kind.__name__} of {tuple(value.shape)} {value.dtype}"  # type: ignore[attr-defined]
    try:
        if hasattr(kind, "__len__") and len(value) > _MOST_ENTRIES and not isinstance(value, range):  # type: ignore[arg-type]
            return f"{kind.__name__} of {len(value)} entries"  # type: ignore[arg-type]
        return _cut(repr(value))
    except Exception:
        return f"an object of {kind.__name__}"


def name_of(value: object) -> str:
    """A name as it is, if it is a short one."""
    return value if isinstance(value, str) and len(value) <= _LONGEST_NAME else shown(value)


def names_of(values: Iterable[object]) -> str:
    """The first of some names, separated by commas; "nothing" if there are none."""
    names = [name_of(value) for value in islice(values, _MOST_ENTRIES + 1)]
    return ", ".join([*names[:_MOST_ENTRIES], *(["..."] if len(names) > _MOST_ENTRIES else [])]) or "nothing"


def nearest(name: str, allowed: Sequence[str]) -> str:
    """Asks, in the middle of a message, whether the allowed name nearest to `name` was meant; "" if none is
    near.
    """
    near = difflib.get_close_matches(name, allowed, n=1)
    return f"did you mean {near[0]}? " if near else ""


def _entries(values: Iterable[Any], show: Callable[[Any], str], depth: int) -> str:
    if depth >= _DEEPEST:
        return "..."
    parts = [show(entry) for entry in islice(values, _MOST_ENTRIES)]
    more = len(values) > _MOST_ENTRIES  # type: ignore[arg-type]
    return ", ".join([*parts, *(["..."] if more else [])])


def _pair(pair: tuple[object, object], depth: int) -> str:
    return f"{shown(pair[0], depth + 1)}: {shown(pair[1], depth + 1)}"


def _is_array(value: object) -> bool:
    # By its attributes: what shows values knows neither torch nor NumPy. A scalar of NumPy is a number.
    return all(hasattr(type(value), name) for name in ("shape", "dtype", "ndim")) and hasattr(
        type(value), "__setitem__"
    )


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."

"""Outputs of a tower's own classes, whose fields captures make, or are computed when they are read."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar

from fxsplit_encoder._torch.dispatch import register_tuple


class Lazy:
    """A value computed at its first use, as a field of an output, an entry of a `LazyTuple` or by torch."""

    __slots__ = ("_compute", "_value")

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute: Callable[[], Any] | None = compute
        self._value: Any = None

    def value(self) -> Any:
        """Computes the value unless that was done."""
        compute = self._compute
        if compute is not None:
            self._value = compute()
            self._compute = None  # it holds the call's arguments
        return self._value

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*computed(tuple(args)), **computed(kwargs or {}))


def computed(value: Any) -> Any:
    """Replaces `Lazy` values by their values, also in tuples, lists and dictionaries."""
    if type(value) is Lazy:
        return value.value()
    if isinstance(value, dict):
        return {name: computed(entry) for name, entry in value.items()}
    if type(value) in (tuple, list, LazyTuple):
        return (list if type(value) is list else tuple)(map(computed, value))
    return value


def _moved(value: Any, *args: Any, **kwargs: Any) -> Any:
    """Moves a tensor, or those of a tuple or list, `Lazy` ones when they are computed."""
    if type(value) is Lazy:
        return Lazy(lambda: value.value().to(*args, **kwargs))
    if isinstance(value, tuple | list):
        entries = tuple.__iter__(value) if isinstance(value, tuple) else value
        return type(value)([_moved(entry, *args, **kwargs) for entry in entries])
    return value if value is None else value.to(*args, **kwargs)


class LazyTuple(tuple[Any, ...]):
    """A tuple whose `Lazy` entries are computed when they are read."""

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(index)
        return LazyTuple(value) if isinstance(index, slice) else computed(value)

    def __iter__(self) -> Iterator[Any]:
        return map(computed, super().__iter__())

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Moves all entries, `Lazy` ones when they are computed."""
        return _moved(self, *args, **kwargs)

    def __add__(self, other: Any) -> Any:
        return tuple(self) + other

    def __radd__(self, other: Any) -> Any:
        return other + tuple(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return tuple, (tuple(self),)


register_tuple(LazyTuple)


def make_output(kind: type, values: Mapping[str, Any]) -> Any:
    """An output of the tower's class `kind` with values for all fields, in order; any may be a `Lazy`."""
    is_whole = not any(type(value) in (Lazy, LazyTuple) for value in values.values())
    output = (kind if is_whole else _deferring(kind))(**values)
    if [*values] != [*output]:
        for name in values:
            output.move_to_end(name)
    return output


class _Deferring(OrderedDict[str, Any]):
    """Methods of an output whose `Lazy` fields are computed when they are read by name or position."""

    _kind: ClassVar[Any]

    def __post_init__(self) -> None:
        # transformers looks whether the first field is a dictionary.
        if type(vars(self).get(fields(self._kind)[0].name)) is not Lazy:
            super().__post_init__()  # type: ignore[misc]

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if type(value) is Lazy:
            value = value.value()
            setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # transformers looks up all fields at each.
        if value is not None and name in type(self)._kind.__dataclass_fields__:
            OrderedDict.__setitem__(self, name, value)
        object.__setattr__(self, name, value)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        value = dict.__getitem__(self, key)
        return getattr(self, key) if type(value) is Lazy else value

    def get(self, key: Any, default: Any = None) -> Any:
        """A field by its name."""
        return self[key] if key in self else default

    def values(self) -> Any:
        """All fields."""
        return [self[name] for name in self]

    def items(self) -> Any:
        """All fields and their names."""
        return [(name, self[name]) for name in self]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Moves all fields. accelerate's hooks ask for it where a walk over the fields would compute them."""
        entries = zip(self, super().values(), strict=True)
        return make_output(self._kind, {name: _moved(value, *args, **kwargs) for name, value in entries})

    def to_tuple(self) -> LazyTuple:
        """All fields, in the places that the tower's own have."""
        return LazyTuple(super().values())

    def __reduce__(self) -> Any:
        return self._kind, tuple(computed(getattr(self, each.name)) for each in fields(self._kind))


@functools.cache
def _deferring(kind: type) -> Any:
    """A subclass of `kind` with `Lazy` fields. A pickle has `kind` itself."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Deferring, kind), {**names, "_kind": kind})

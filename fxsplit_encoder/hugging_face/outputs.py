"""Outputs of a tower's own classes, whose fields captures make or the tower itself computes at their first
use, not when an output is walked over, moved or copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, KeysView, Mapping
from dataclasses import fields
from typing import Any, ClassVar

from torch import Tensor

from fxsplit_encoder._torch.dispatch import register_tuple

# Methods that move a tensor, and attributes known of one before it is computed.
_MOVES = frozenset({"to", "cpu", "cuda", "float", "half", "bfloat16", "double", "detach"})
_KNOWN = frozenset({"device", "dtype", "requires_grad", "grad_fn", "is_cuda", "layout"})


class Lazy:
    """A value computed at its first use by an operator, by torch or as an attribute of an output. `like` is
    an empty value of its class, dtype and device.
    """

    __slots__ = ("_compute", "_like", "_value")

    def __init__(self, like: Any, compute: Callable[[], Any]) -> None:
        self._like = like
        self._compute: Callable[[], Any] | None = compute
        self._value: Any = None

    def value(self) -> Any:
        """Computes the value unless that was done."""
        compute = self._compute
        if compute is not None:
            self._value = compute()
            self._compute = None  # it holds the call's arguments
        return self._value

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._like)  # for `isinstance`

    def __getattr__(self, name: str) -> Any:
        if isinstance(self._like, Tensor):
            if name in _KNOWN:
                return getattr(self._like, name)
            if name in _MOVES:
                return functools.partial(_moved, self, name)
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*computed(tuple(args)), **computed(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return computed, (self.value(),)


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return getattr(computed(self), name)(*computed(args))

    return method


_OWN = frozenset(
    {
        *vars(Lazy),
        *("__new__", "__getattribute__", "__setattr__", "__delattr__", "__del__", "__dir__", "__sizeof__"),
        *("__init_subclass__", "__subclasshook__", "__reduce__", "__setstate__", "__torch_dispatch__"),
    }
)
for _name in {*dir(Tensor), *dir(tuple)} - _OWN:
    if _name.startswith("__") and callable(getattr(Tensor, _name, None) or getattr(tuple, _name, None)):
        setattr(Lazy, _name, _forwarded(_name))


def computed(value: Any) -> Any:
    """Replaces `Lazy` values by their values, also in tuples, lists and dictionaries."""
    if type(value) is Lazy:
        return value.value()
    if isinstance(value, dict):
        return {name: computed(entry) for name, entry in value.items()}
    if type(value) in (tuple, list, LazyTuple):
        entries = map(computed, tuple.__iter__(value) if type(value) is LazyTuple else value)
        return list(entries) if type(value) is list else tuple(entries)
    return value


def _moved(lazy: Lazy, name: str, *args: Any, **kwargs: Any) -> Lazy:
    like = getattr(lazy._like, name)(*args, **kwargs)
    return Lazy(like, lambda: getattr(lazy.value(), name)(*args, **kwargs))


class LazyTuple(tuple[Any, ...]):
    """A tuple whose `Lazy` entries are computed when they are read."""

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(index)
        return LazyTuple(value) if isinstance(index, slice) else computed(value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return computed, (computed(self),)


register_tuple(LazyTuple)


def make_output(kind: type, values: Mapping[str, Any]) -> Any:
    """An output of the tower's class `kind` with values for all fields, in order; any may be a `Lazy`."""
    if not any(type(value) in (Lazy, LazyTuple) for value in values.values()):
        return kind(**values)
    output = _deferring(kind)(**values)
    if [*values] != [*dict.keys(output)]:
        for name in values:
            output.move_to_end(name)
    return output


class _Field:
    """A field of an output, computed when it is first read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, output: Any, owner: type) -> Any:
        if output is None:
            return None  # the default of a field
        value = vars(output).get(self.name)
        if type(value) is Lazy:
            output[self.name] = value = computed(value)
        return value

    def __set__(self, output: Any, value: Any) -> None:
        vars(output)[self.name] = value


class _Walked(str):
    """A field's name from a walk over an output: indexing by it computes nothing."""

    def __reduce__(self) -> Any:
        return str, (str(self),)


class _Deferring:
    """Methods of an output whose `Lazy` fields are computed when they are read by name or position."""

    _kind: ClassVar[type]

    def __post_init__(self) -> None:
        # transformers looks whether the first field is a dictionary.
        if type(vars(self).get(fields(self._kind)[0].name)) is not Lazy:
            super().__post_init__()  # type: ignore[misc]

    def keys(self) -> KeysView[str]:
        """The names, as `_Walked`: a copy of all entries computes none."""
        return dict.fromkeys(map(_Walked, super().__iter__())).keys()  # type: ignore[misc]

    def __iter__(self) -> Any:
        return iter(self.keys())

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        value: Any = dict.__getitem__(self, key)  # type: ignore[index]
        return getattr(self, key) if type(value) is Lazy and type(key) is not _Walked else value

    def get(self, key: Any, default: Any = None) -> Any:
        """A field by its name."""
        return self[key] if key in self else default

    def copy(self) -> Any:
        """Another output of the same entries."""
        kind: Any = type(self)
        return kind(dict(self.items()))  # type: ignore[attr-defined]

    def to_tuple(self) -> LazyTuple:
        """All fields, in the places that the tower's own have."""
        return LazyTuple(self.values())  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        return self._kind, tuple(computed(getattr(self, each.name)) for each in fields(self._kind))


@functools.cache
def _deferring(kind: type) -> Any:
    """A subclass of `kind` with `Lazy` fields. A pickle has `kind` itself."""
    own = {each.name: _Field(each.name) for each in fields(kind)}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Deferring, kind), {**own, **names, "_kind": kind})

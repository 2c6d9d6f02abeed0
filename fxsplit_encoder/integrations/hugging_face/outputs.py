"""A tower's own outputs, of which captures make what models read.

What they do not make, as hidden states that a caller asked for, the tower itself computes once it is read.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

from torch import Tensor

_PENDING = "_fxsplit_pending"


def make_output(
    kind: type, made: Mapping[str, Any], pending: Iterable[str], compute: Callable[[], Mapping[str, Any]]
) -> Any:
    """An output of a tower.

    Args:
        kind: the tower's class of outputs.
        made: the fields that captures made.
        pending: the names of those that they did not.
        compute: the tower's own output, all fields of it.
    """
    pending = frozenset(pending)
    if not pending and not any(isinstance(value, HiddenStates) for value in made.values()):
        return kind(**made)
    output = _deferring(kind)(**made)
    vars(output)[_PENDING] = (pending, compute)
    return output


class _Field:
    """A field of an output, which is computed when it is read for the first time, if it is pending."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, output: Any, owner: type) -> Any:
        if output is None:
            return None  # the default of a field
        own = vars(output)
        if self.name in own.get(_PENDING, ((),))[0]:
            output._resolve()
        return own.get(self.name)

    def __set__(self, output: Any, value: Any) -> None:
        own = vars(output)
        own[self.name] = value
        if _PENDING in own:  # who sets a field needs no other value of it
            names, compute = own[_PENDING]
            own[_PENDING] = (names - {self.name}, compute)


class _Deferring:
    """The methods of an output of which some fields are pending: whatever looks at all of them, as at a
    dictionary or a tuple, has them computed.
    """

    _kind: ClassVar[type]

    def _resolve(self) -> None:
        own: dict[str, Any] = vars(self)
        if _PENDING not in own:
            return
        names, compute = own.pop(_PENDING)
        output: Any = self
        partly = [name for name, value in own.items() if isinstance(value, HiddenStates)]
        computed = compute() if names or partly else {}
        for name in (*names, *partly):
            if computed.get(name) is not None:
                output[name] = computed[name]
        # In the order of the tower's own, and then what was set later.
        present = list(OrderedDict.keys(output))
        later = [name for name in present if name not in computed]
        for name in [*(name for name in computed if name in present), *later]:
            output.move_to_end(name)

    def __getitem__(self, key: Any) -> Any:
        names = vars(self).get(_PENDING, ((),))[0]
        output: Any = self
        if not isinstance(key, str) or key in names or not dict.__contains__(output, key):
            self._resolve()
        elif names:
            return vars(self)[key]
        return super().__getitem__(key)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        self._resolve()
        return self._kind, tuple(getattr(self, each.name) for each in fields(self._kind))


def _resolved(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._resolve()
        return getattr(super(_Deferring, self), name)(*args, **kwargs)

    method.__name__ = name
    return method


_LOOKS_AT_ALL = ("__iter__", "__reversed__", "__len__", "__contains__", "__eq__", "__ne__", "__repr__")
for _name in (*_LOOKS_AT_ALL, "keys", "values", "items", "get", "copy", "to_tuple"):
    setattr(_Deferring, _name, _resolved(_name))


@functools.cache
def _deferring(kind: type) -> Any:
    """A class like `kind` whose fields may be pending. A pickle has `kind` itself."""
    own = {each.name: _Field(each.name) for each in fields(kind)}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Deferring, kind), {**own, **names, "_kind": kind})


class HiddenStates(Sequence[Tensor]):
    """The hidden states of a tower's layers, of which captures made some; any other has the tower itself
    compute them all.

    Args:
        made: by the number of the layer, 0 for what goes into the first.
        count: of all hidden states.
        compute: all of them.
    """

    def __init__(
        self, made: Mapping[int, Tensor], count: int, compute: Callable[[], Sequence[Tensor]]
    ) -> None:
        self._made = made
        self._count = count
        self._compute = functools.cache(compute)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index % self._count in self._made and abs(index) <= self._count:
            return self._made[index % self._count]
        return self._compute()[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._compute())

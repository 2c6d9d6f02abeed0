"""Which names the code of modules reads, by its bytecode: attributes of other names cannot change what a
forward computes.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

_ENTRIES = ("__call__", "forward", "encoder_cudagraph_forward", "encoder_eager_forward")
"""The methods by which modules and towers are called."""

_OF_ITS_OWN = ("_ATTR", "_METHOD", "GET_ITER", "COPY")
"""Instructions that take `self` for one of its attributes: the last one for an attribute that is added to."""


class Reads(NamedTuple):
    """What code reads."""

    names: frozenset[str]
    """Of attributes, globals and methods, and every string, by which code may read one too."""
    written: frozenset[str]
    """Attributes that the code itself assigns, as a counter of its calls: they are its state."""
    passes_self: bool
    """Whether a module is given to other code, which may read anything of it."""


def reads_of(kind: type) -> Reads:
    """What the forward of modules of a class reads, and the methods and functions that it calls by name."""
    found, passes_self = _reach(_defined(kind, _ENTRIES), kind)
    forwards = list(_defined(kind, ("forward",)))
    # Of a forward that is no Python code nothing tells what it reads; containers have none at all.
    is_unknown = bool(forwards) and not any(map(_code_of, forwards))
    return Reads(
        frozenset(name for each in found for name in each.names),
        frozenset(name for each in found for name in each.written),
        # torch's own modules are given to functions that count or iterate over them.
        is_unknown or (passes_self and not kind.__module__.startswith("torch.")),
    )


def _reach(entries: Iterable[Any], kind: type) -> tuple[list[Reads], bool]:
    """What is read by functions and by all that they call by name; whether one of them gives `self` away."""
    pending, known, found, passes_self = list(entries), set[int](), list[Reads](), False
    while pending:
        function = pending.pop()
        code = _code_of(function)
        if code is None or id(function) in known:
            continue
        known.add(id(function))
        reads = _reads_of_code(code)
        found.append(reads)
        is_method = code.co_varnames[:1] == ("self",)
        inner = getattr(function, "__wrapped__", None)
        # A decorator gives `self` to what it surrounds.
        passes_self |= is_method and reads.passes_self and inner is None
        pending += [*_defined(kind, reads.names), *_functions(function, reads.names), inner]
    return found, passes_self


def _code_of(function: Any) -> types.CodeType | None:
    if isinstance(function, property):
        function = function.fget
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _defined(kind: type, names: Iterable[str]) -> Iterator[Any]:
    """What a class and its bases define under these names; a method may call that of a base."""
    for base in kind.__mro__:
        if base not in (nn.Module, object):
            yield from (vars(base)[name] for name in names if name in vars(base))


def _functions(function: Any, names: Iterable[str]) -> Iterator[Any]:
    """The functions of a function's module that it names; torch's read no attributes of modules."""
    for name in names:
        value = getattr(function, "__globals__", {}).get(name)
        if inspect.isfunction(value) and not value.__module__.startswith("torch."):
            yield value


@functools.lru_cache(maxsize=1024)
def _reads_of_code(code: types.CodeType) -> Reads:
    names, written, passes_self = {*code.co_names}, set[str](), False
    previous: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
            written.add(instruction.argval)
        is_attribute = any(word in instruction.opname for word in _OF_ITS_OWN)
        passes_self |= previous is not None and _loads_self(previous) and not is_attribute
        previous = instruction
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
        elif isinstance(constant, types.CodeType):
            inner = _reads_of_code(constant)
            names |= inner.names
            written |= inner.written
            passes_self |= inner.passes_self
    return Reads(frozenset(names), frozenset(written), passes_self)


def _loads_self(instruction: dis.Instruction) -> bool:
    """Whether it leaves the variable `self` on top of the stack: two may be loaded by one instruction."""
    if not instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST")):
        return False
    value = instruction.argval
    return bool(value == "self" or (isinstance(value, tuple) and "self" in value))

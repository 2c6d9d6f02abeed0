"""Which names the code of modules reads, by its bytecode: attributes of other names cannot change what a
forward computes.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

FORWARD_OF_CAPTURES = "encoder_cudagraph_forward"

_ENTRIES = ("__call__", "forward", FORWARD_OF_CAPTURES)
"""The methods by which modules and towers are called where they are captured."""

CALLED_AT_REQUESTS = (
    *("get_encoder_cudagraph_config", "get_input_modality", "get_max_frames_per_video"),
    *("get_encoder_cudagraph_budget_range", "get_encoder_cudagraph_item_specs"),
    *("select_encoder_cudagraph_items", "prepare_encoder_cudagraph_capture_inputs"),
    *("prepare_encoder_cudagraph_replay_buffers", "encoder_eager_forward", "postprocess_encoder_output"),
)
"""The other methods of `SupportsEncoderCudaGraph`: no capture holds what they compute."""

_ADDS = frozenset(("append", "extend", "insert", "add", "update", "setdefault", "subtract"))
"""Methods by which code keeps something in a container. Not those that take out: what these find there was
perhaps put in from outside, as the adapters are that peft's forward unmerges.
"""

_OF_ITS_OWN = ("_ATTR", "_METHOD", "GET_ITER", "COPY")
"""Instructions that take `self` for one of its attributes: the last one for an attribute that is added to."""


class Reads(NamedTuple):
    """What code reads."""

    names: frozenset[str]
    """Of attributes, globals and methods, and every string, by which code may read one too."""
    written: frozenset[str]
    """Attributes that the code itself assigns or adds to, as a counter of its calls: they are its state."""
    passes_self: bool
    """Whether a module is given to other code, which may read anything of it."""


def reads_of(kind: type) -> Reads:
    """What the forward of modules of a class reads, and the methods and functions that it calls by name; what
    these write, and the other methods that a manager calls.
    """
    found, passes_self = _reach(_defined(kind, _ENTRIES), kind)
    writing = [*found, *_reach(_defined(kind, CALLED_AT_REQUESTS), kind)[0]]
    forwards = list(_defined(kind, ("forward",)))
    # Of a forward that is no Python code nothing tells what it reads; containers have none at all.
    is_unknown = bool(forwards) and not any(map(_code_of, forwards))
    return Reads(
        frozenset(name for each in found for name in each.names),
        frozenset(name for each in writing for name in each.written),
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
    instructions = list(dis.get_instructions(code))
    names, written, passes_self = {*code.co_names}, _written(instructions), False
    for previous, instruction in pairwise(instructions):
        is_attribute = any(word in instruction.opname for word in _OF_ITS_OWN)
        passes_self |= _loads_self(previous) and not is_attribute
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
        elif isinstance(constant, types.CodeType):
            inner = _reads_of_code(constant)
            names |= inner.names
            written |= inner.written
            passes_self |= inner.passes_self
    return Reads(frozenset(names), frozenset(written), passes_self)


def _written(instructions: Iterable[dis.Instruction]) -> set[str]:
    """The attributes that code assigns, and those that hold a container which it adds to, also by the name of
    a variable. `self.runs[key]` and the `self.runs` in it start at the same place in the source.
    """
    written, variables = set[str](), dict[str, str]()
    held: dict[Any, str] = {}  # the attribute that was read last, by where its expression starts
    before: dis.Instruction | None = None
    for each in instructions:
        start = _start(each)
        if each.opname in ("STORE_ATTR", "DELETE_ATTR"):
            written.add(each.argval)
        elif each.opname in ("STORE_SUBSCR", "STORE_SLICE") and start in held:
            written.add(held[start])
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if each.argval in _ADDS and before is not None and _start(before) in held:
                written.add(held[_start(before)])
            held[start] = each.argval
        elif each.opname == "STORE_FAST" and before is not None and before.opname == "LOAD_ATTR":
            variables[each.argval] = before.argval
        elif each.opname.startswith("LOAD_FAST") and each.argval in variables:
            held[start] = variables[each.argval]
        before = each
    return written


def _start(instruction: dis.Instruction) -> tuple[int | None, int | None] | None:
    positions = instruction.positions
    return positions and (positions.lineno, positions.col_offset)


def _loads_self(instruction: dis.Instruction) -> bool:
    """Whether it leaves the variable `self` on top of the stack: two may be loaded by one instruction."""
    if not instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST")):
        return False
    value = instruction.argval
    return bool(value == "self" or (isinstance(value, tuple) and "self" in value))

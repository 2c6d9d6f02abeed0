"""Names that the bytecode of modules reads: attributes of other names change nothing that it computes."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
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
"""Methods that add to a container. Those that take out may find what was put in from outside."""

_OF_ITS_OWN = ("_ATTR", "_METHOD", "GET_ITER", "COPY")
"""Instructions that take `self` for one of its attributes: the last for one that is added to."""

_LOADS = ("LOAD_FAST", "LOAD_DEREF")


class _Step(NamedTuple):
    """An instruction, its argument, and the line and column where its expression starts."""

    operation: str
    value: Any
    start: tuple[int | None, int | None]


class Reads(NamedTuple):
    """Names that code reads and writes."""

    names: frozenset[str]
    """Of attributes, globals and methods, and every string, by which code may read one too."""
    written: frozenset[str]
    """Attributes that the code itself assigns or adds to, as a counter of its calls: they are its state."""
    passes_self: bool
    """Whether a module is given to other code, which may read anything of it."""


def reads_of(kind: type) -> Reads:
    """Returns what a class's forward and all that it calls by name read, and what they and requests write."""
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
    """The reads of functions and all that they call by name; whether one gives `self` away."""
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
    steps = list(chain.from_iterable(map(_steps_of, dis.get_instructions(code))))
    names, written, passes_self = {*code.co_names}, _written(steps), False
    for before, step in pairwise(steps):
        loads_self = before.value == "self" and before.operation.startswith(_LOADS)
        passes_self |= loads_self and not any(word in step.operation for word in _OF_ITS_OWN)
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
        elif isinstance(constant, types.CodeType):
            inner = _reads_of_code(constant)
            names |= inner.names
            written |= inner.written
            passes_self |= inner.passes_self
    return Reads(frozenset(names), frozenset(written), passes_self)


def _written(steps: Iterable[_Step]) -> set[str]:
    """Attributes that code assigns, and containers that it adds to, also through a variable."""
    written, variables = set[str | None](), dict[str, str | None]()
    # The attribute read last, by the start of its expression: `self.runs[key]` starts where `self.runs` does.
    held: dict[tuple[int | None, int | None], str | None] = {}
    before = _Step("", None, (None, None))
    for step in steps:
        operation, value, start = step
        if operation in ("STORE_ATTR", "DELETE_ATTR"):
            written.add(value)
        elif operation in ("STORE_SUBSCR", "STORE_SLICE"):
            written.add(held[start] if start in held else held.get((start[0], None)))
        elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
            if value in _ADDS:
                written.add(held.get(before.start))
            held[start] = value
        elif operation == "STORE_FAST":
            variables[value] = before.value if before.operation == "LOAD_ATTR" else None
        elif operation.startswith(_LOADS):
            held[start] = variables.get(value)
        before = step
    return {name for name in written if name is not None}


def _steps_of(instruction: dis.Instruction) -> Iterator[_Step]:
    """An instruction, or the two that Python 3.13 joins: the second has no column."""
    operation, value, positions = instruction.opname, instruction.argval, instruction.positions
    line, column = (positions.lineno, positions.col_offset) if positions is not None else (None, None)
    if "_FAST" in operation and isinstance(value, tuple):
        yield _Step("STORE_FAST" if operation.startswith("STORE") else "LOAD_FAST", value[0], (line, column))
        yield _Step("STORE_FAST" if "_STORE" in operation else "LOAD_FAST", value[1], (line, None))
    else:
        yield _Step(operation, value, (line, column))

"""The structure of a tower, and whether it has changed since captures and programs were made of it."""

from __future__ import annotations

import contextlib
import copy
import dis
import enum
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from fxsplit_encoder._torch.peft import (
    ACTIVE,
    MERGED,
    SWITCHES,
    adapters_of,
    is_adapter_layer,
    modules_out_of_use,
    unread_of,
    values_in_use,
)
from fxsplit_encoder._torch.tensors import children_of, forward_hooks_of
from fxsplit_encoder._torch.transformers import BOOKKEEPING, collects_outputs, device_hook

PLACE = "_fxsplit_place"
"""The attribute of a block with its group's number and its index there, while it may be an op."""

OWN = "_fxsplit_own"
"""The attribute of a tower that is a copy of this library's own, which does not change."""

FORWARD_OF_CAPTURES = "encoder_cudagraph_forward"

CALLED_AT_REQUESTS = (
    *("get_encoder_cudagraph_config", "get_input_modality", "get_max_frames_per_video"),
    *("get_encoder_cudagraph_budget_range", "get_encoder_cudagraph_item_specs"),
    *("select_encoder_cudagraph_items", "prepare_encoder_cudagraph_capture_inputs"),
    *("prepare_encoder_cudagraph_replay_buffers", "encoder_eager_forward", "postprocess_encoder_output"),
)
"""The other methods of `SupportsEncoderCudaGraph`: no capture holds what they compute."""

_END: Any = object()


class Held:
    """Values of dictionaries, compared by identity in one pass in C."""

    def __init__(self, dictionaries: Iterable[Mapping[Any, Any]]) -> None:
        # Views follow their dictionaries. With a last value of its own no dictionary may gain or lose one.
        self._views: list[Iterable[Any]] = [*(held.values() for held in dictionaries), (_END,)]
        self._values = list(chain.from_iterable(self._views))

    def is_same(self) -> bool:
        """Whether each holds the same objects in the same order."""
        try:
            return all(map(is_, chain.from_iterable(self._views), self._values))
        except RuntimeError:  # another thread is changing one
            return False


_FORWARD, _HOOK, _CODE, _CONFIG = "forward", "hook", "forward of the class", "config"
_ALIGNS = "AlignDevicesHook"
_IN_TRAINING = itemgetter("training")
_forward_of, _config_of = attrgetter(_FORWARD), itemgetter(_CONFIG)

_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.Size, enum.Enum),
)
_CALLABLES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type)
_CONTAINERS = (list, tuple, set, frozenset)

_TORCH = "torch.nn.modules."
_FEW_KEYS = 3
_ORDERED = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NEVER_CALLED = frozenset((nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
"""Containers, whose hooks never run. Each of PEFT's layers has six: with their hooks a comparison takes twice
as long."""

_IGNORED = frozenset(
    {*vars(nn.Module()), _FORWARD, _CONFIG, PLACE, "_compiled_call_impl", *BOOKKEEPING, *CALLED_AT_REQUESTS}
)


class _Other:
    def __repr__(self) -> str:
        return "a value that is not compared"


_OTHER = _Other()
"""Stands for an attribute that is missing or has no plain value."""

Fact = tuple[str, str]
"""The name of a module, and of something about it."""


class Structure:
    """Classes, hooks, forwards and read values of a tower; the outermost module's vary if `is_around`."""

    def __init__(self, tower: nn.Module, *, is_around: bool = False) -> None:
        self._tower = tower
        self._is_around = is_around
        self._seen = _Seen(self._tower, self._is_around)

    def is_unchanged(self) -> bool:
        """Whether the modules are the same, but for their modes."""
        return self._seen.is_current() or (not self.has_other_adapters() and self.of_now([self]) is self)

    @property
    def has_adapters(self) -> bool:
        """Whether layers have adapters, in use or not."""
        return bool(self._seen.layers)

    def has_other_adapters(self) -> bool:
        """Whether layers compute with other adapters, merges or scales: found long before all else is."""
        return self._seen.has_other_adapters()

    @property
    def has_merged(self) -> bool:
        """Whether adapters are merged, so that weights have other values than in other states."""
        return any(value for (_, what), value in self._seen.facts.items() if what == MERGED)

    def is_current(self) -> bool:
        """Whether nothing at all has changed, which takes the least time to find out."""
        return self._seen.is_current()

    @staticmethod
    def of_now(structures: Sequence[Structure]) -> Structure | None:
        """Returns the structure that its tower has now, of several; None: it has another."""
        for each in structures:
            if each._seen.is_current():
                return each
        # What counts as no change comes and goes, and values may be replaced by equal ones.
        seen: dict[tuple[nn.Module, bool], _Seen] = {}
        for each in structures:
            tower = each._tower, each._is_around
            now = seen[tower] = seen.get(tower) or _Seen(*tower)
            if now.modules == each._seen.modules and now.facts == each._seen.facts:
                each._seen = now
                return each
        return None

    def may_return(self) -> bool:
        """Whether every module is still there, so that values that were set back would make it unchanged."""
        there = {id(module) for _, module in _all_modules(self._tower)}
        return all(id(module) in there for _, module, _ in self._seen.modules)

    @property
    def modes(self) -> list[bool]:
        """Training modes of the modules whose code may read it."""
        return list(map(_IN_TRAINING, self._seen.modal.values()))

    def in_training(self) -> str | None:
        """The first module in training mode whose code may read it, or None."""
        if not any(map(_IN_TRAINING, self._seen.modal.values())):
            return None
        return next(name for name, own in self._seen.modal.items() if own["training"]) or "the tower"

    @property
    def additions(self) -> Collection[Fact]:
        """Names of modules with a "hook" or a "forward" in addition to what their classes have."""
        return [fact for fact in self._seen.facts if fact[1] in (_HOOK, _FORWARD)]

    def change(self) -> str:
        """Returns what has changed, in a few words; empty: nothing."""
        if self.is_unchanged():
            return ""
        before, now = self._seen, _Seen(self._tower, self._is_around)
        names = {**before.facts, **now.facts}
        facts = {fact: (before.facts.get(fact, _OTHER), now.facts.get(fact, _OTHER)) for fact in names}
        for (name, what), (old, new) in facts.items():
            if what == ACTIVE and _OTHER not in (old, new) and new != old:
                return f"{name or 'the tower'}: adapters in use {new!r}, which were {old!r}"
        there, here = ({name: (m, kind) for name, m, kind in seen.modules} for seen in (before, now))
        for name in dict.fromkeys((*there, *here)):
            old, new = there.get(name, (None, type(None))), here.get(name, (None, type(None)))
            if old != new:
                return f"{name or 'the tower'}: a {old[1].__name__}, and now another {new[1].__name__}"
        if before.modules != now.modules:
            return "modules in another order than before"
        for (name, what), (old, new) in facts.items():
            if old is not new and old != new:
                is_code = what in (_HOOK, _FORWARD, _CODE)
                now_is = f"another {what} than before" if is_code else f"{what} {new!r}, which was {old!r}"
                return f"{name or 'the tower'}: {now_is}"
        return ""


class _Seen:
    """A tower at one moment: facts to compare, laid out for a fast comparison."""

    def __init__(self, tower: nn.Module, is_around: bool) -> None:
        self.modules = [(name, module, type(module)) for name, module in _named_modules(tower)]
        self.facts: dict[Fact, Any] = {}
        self._reads = {kind: reads_of(kind) for kind in {kind for _, _, kind in self.modules}}
        names = chain.from_iterable(reads.names for reads in self._reads.values())
        self._names = frozenset((FORWARD_OF_CAPTURES, *names))
        inner = {
            name: module
            for name, module, kind in self.modules
            if kind not in _NEVER_CALLED and (module is not tower or not is_around)
        }
        self._take_modules()
        self._take_additions(inner)
        self._take_values()
        self.layers = {
            name: (module, found)
            for name, module, _ in self.modules
            if is_adapter_layer(module) and (found := [n for n in SWITCHES if (name, n) in self.facts])
        }
        self._switches = [(itemgetter(*found), vars(module)) for module, found in self.layers.values()]
        self._switched = [copy_of(get(held)) for get, held in self._switches]
        self.modal = {
            name: vars(module)
            for name, module, kind in self.modules
            if not _is_adapter(module) and _is_modal(module, self._reads[kind].names)
        }

    def _take_modules(self) -> None:
        modules = [module for _, module, _ in self.modules]
        self._list, self._classes = modules, list(map(type, modules))
        children = list(map(children_of, modules))
        leaves = [m for m in modules if type(m).__module__.startswith(_TORCH) and not isinstance(m, _ORDERED)]
        read = map(children_of, set(modules).difference(leaves))
        self._empty: list[Any] = [held for held in read if not held]
        self._held: list[dict[Any, Any]] = [held for held in children if held]
        by_name = set(chain.from_iterable(map(adapters_of, filter(is_adapter_layer, modules))))
        ordered = [module for module in modules if isinstance(module, _ORDERED) and module not in by_name]
        self._ordered = list(map(children_of, ordered))
        self._order = list(map(tuple, self._ordered))
        first = {kind: name for name, _, kind in reversed(self.modules)}
        self._kinds = list(first)
        self._code = list(map(_forward_of, self._kinds))
        self.facts.update(((first[kind], _CODE), _forward_of(kind)) for kind in first)

    def _take_additions(self, inner: Mapping[str, nn.Module]) -> None:
        hooks = [held for module in inner.values() for held in forward_hooks_of(module)]
        # To ask empty dictionaries whether they are empty takes a third of the time of counting.
        self._empty += [held for held in hooks if not held]
        self._held += [held for held in hooks if held]
        self._held_then = list(map(dict, self._held))
        for name, module in inner.items():
            found = [hook for held in forward_hooks_of(module) for hook in held.values()]
            if found := [hook for hook in found if not collects_outputs(hook)]:
                self.facts[name, _HOOK] = found
            if _FORWARD in vars(module) and not _is_plain_forward(module):
                self.facts[name, _FORWARD] = vars(module)[_FORWARD]

    def _take_values(self) -> None:
        """Notes what modules and their configurations hold, in groups of the same names."""
        self._own: list[dict[str, Any]] = []
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        configs: dict[int, tuple[str, dict[str, Any], Any]] = {}

        def add(
            name: str,
            held: dict[str, Any],
            is_read: Callable[[str], bool],
            read: Callable[[str, Any], Any] = lambda key, value: value,
        ) -> None:
            keys = [key for key, value in held.items() if is_read(key) and _is_plain(value)]
            self.facts.update(((name, key), _fact_of(read(key, held[key]))) for key in keys)
            self._own.append(held)
            keys += [_FORWARD] if _FORWARD in held else []
            # Two look-ups take less than a look-up of two that makes a tuple.
            for together in [tuple(keys)] if len(keys) > _FEW_KEYS else [(key,) for key in keys]:
                groups.setdefault(together, []).append(held)

        ignored = {
            kind: _IGNORED | reads.written | _computed_once(kind) for kind, reads in self._reads.items()
        }
        for name, module, kind in self.modules:
            if kind in (nn.ModuleList, nn.ModuleDict):  # which hold their modules alone
                continue
            held = vars(module)
            names = frozenset(held) if self._reads_all(name, module) else self._names
            names = names.difference(held if _is_adapter(module) else ignored[kind])
            if is_adapter_layer(module):
                read = functools.partial(values_in_use, module)
                add(name, held, names.difference(unread_of(module)).__contains__, read)
            else:
                add(name, held, names.__contains__)
            if hasattr(held.get(_CONFIG), "__dict__") and not isinstance(held[_CONFIG], nn.Module):
                configs.setdefault(id(held[_CONFIG]), (name, held, held[_CONFIG]))
        for name, _, config in configs.values():
            add(f"{name}.{_CONFIG}".lstrip("."), vars(config), lambda key: key not in _IGNORED)
        self._configured = [held for _, held, _ in configs.values()]
        self._configs = [config for _, _, config in configs.values()]
        self._num_attributes = list(map(len, self._own))
        self._groups = [
            (get, holders, [copy_of(get(held)) for held in holders])
            for get, holders in ((itemgetter(*keys), holders) for keys, holders in groups.items())
        ]

    def has_other_adapters(self) -> bool:
        with contextlib.suppress(KeyError):  # an attribute that is gone is told below
            if [get(held) for get, held in self._switches] == self._switched:
                return False
        return any(
            values_in_use(layer, what, vars(layer).get(what)) != self.facts[name, what]
            for name, (layer, names) in self.layers.items()
            for what in names
        )

    def _reads_all(self, name: str, module: nn.Module) -> bool:
        is_added_to = (name, _HOOK) in self.facts or (name, _FORWARD) in self.facts
        return is_added_to or self._reads[type(module)].passes_self

    def is_current(self) -> bool:
        """Whether nothing has changed at all; if not, `modules` and `facts` say whether it matters."""
        try:
            if (
                self._held != self._held_then
                or list(map(type, self._list)) != self._classes
                or any(self._empty)
                or list(map(len, self._own)) != self._num_attributes
                or list(map(tuple, self._ordered)) != self._order
                or list(map(_forward_of, self._kinds)) != self._code
                or not all(map(is_, map(_config_of, self._configured), self._configs))
            ):
                return False
            for get, held, values in self._groups:
                if list(map(get, held)) != values:
                    return False
            return True
        except (KeyError, TypeError, ValueError, RuntimeError):
            # Something is gone, is no plain value any more, or another thread is changing a dictionary.
            return False


def _is_adapter(module: nn.Module) -> bool:
    """Whether a module stands around a tower without being its parent: its mode and values are its own."""
    return any(isinstance(value, nn.Module) for value in vars(module).values())


def _is_modal(module: nn.Module, names: Collection[str]) -> bool:
    """Whether its code reads the training mode, and its rates of dropout, if any, are not all 0."""
    if "training" not in names:
        return False
    switches = {key for key in (*names, *vars(module)) if "drop" in key or key == "gradient_checkpointing"}
    if "Dropout" in type(module).__name__:
        switches.add("p")
    values = [getattr(module, key, None) for key in switches]
    rates = [value for value in values if isinstance(value, (bool, int, float))]
    return not rates or any(rates)


def _computed_once(kind: type) -> frozenset[str]:
    own = (base.__dict__.items() for base in kind.__mro__)
    pairs = chain.from_iterable(own)
    return frozenset(name for name, value in pairs if isinstance(value, functools.cached_property))


def copy_of(value: Any) -> Any:
    """Copies a list or dictionary, so that writes to it do not change the value."""
    if type(value) is tuple:
        return tuple(map(copy_of, value))
    return copy.copy(value) if isinstance(value, (dict, *_CONTAINERS)) else value


def _fact_of(value: Any) -> Any:
    """A value to compare: of a function, which may be made anew, its code and plain values."""
    if not isinstance(value, types.FunctionType):
        return copy_of(value)
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    return value.__code__, *(
        copy_of(each) for each in (*(value.__defaults__ or ()), *cells) if _is_plain(each)
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, _CONTAINERS):
        return all(isinstance(each, (*_VALUES, *_CALLABLES, tuple)) for each in value)
    return isinstance(value, (*_VALUES, *_CALLABLES))


def _named_modules(tower: nn.Module) -> list[tuple[str, nn.Module]]:
    """As `_all_modules`, without those of adapters that are not in use: they come and go."""
    found = list(_all_modules(tower))
    unused = modules_out_of_use(module for _, module in found)
    return [(name, module) for name, module in found if module not in unused] if unused else found


def _all_modules(tower: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of a tower, and those that the outermost holds without being their parent, without copies."""
    known: set[nn.Module] = set()
    held = {key: value for key, value in list(vars(tower).items()) if isinstance(value, nn.Module)}
    for name, outermost in {"": tower, **held}.items():
        if not any(OWN in vars(each) for each in (tower, *held.values())):
            yield from outermost.named_modules(known, name)


def _is_plain_forward(module: nn.Module) -> bool:
    """Whether a module's own forward is its class's all the same: accelerate's, or left by our trace."""
    hook = device_hook(module)
    if hook is not None:
        return type(hook).__name__ == _ALIGNS and not hook.offload
    return hasattr(module, PLACE)


# --- names that the bytecode of modules reads: attributes of other names change nothing that it computes

_ENTRIES = ("__call__", "forward", FORWARD_OF_CAPTURES)
"""The methods by which modules and towers are called where they are captured."""

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

"""Saves a bound program as JSON and restores it in another process, without another trace.

Plain values are written as they are, others as {kind: content}, of the kinds of `_Loader`. A dataclass or
named tuple of this library is its name and its fields; compiled pieces are found in Inductor's cache by their
keys, operators and the tower's parameters by their names. Other objects and code are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.dispatch import OpOverload
from fxsplit_encoder.compile import passes, rewriting
from fxsplit_encoder.compile.branches import Step
from fxsplit_encoder.compile.derived import DerivedParameter, DerivedParameters
from fxsplit_encoder.compile.options import HostOp
from fxsplit_encoder.compile.padding import PaddingReport
from fxsplit_encoder.compile.pieces import CompiledPiece
from fxsplit_encoder.compile.program import BoundProgram, Program, Ref
from fxsplit_encoder.compile.sizes import Size, check_arithmetic
from fxsplit_encoder.errors import CompileError, StartFileError

# Compiled pieces call operators that these register.
_REGISTERED = (passes, rewriting)

_OWN = "fxsplit_encoder."

# Fields for messages, and arguments of `restore_program`.
_NOT_SAVED: Mapping[type, tuple[str, ...]] = {
    PaddingReport: ("joined", "num_nodes", "source"),
    Program: ("constants", "device"),
}

# Saved in forms of their own, or not at all.
_NOT_BY_FIELDS = (HostOp, Ref, Size)

_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)


def save_program(bound: BoundProgram, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns a program as JSON; `tensors` are the tower's parameters and buffers by name. CompileError: it
    holds an object that has no name.
    """
    program = bound.program
    if program.constants:
        raise CompileError("the graph holds tensors of its own")
    known: dict[int, Any] = {id(tensor): {"parameter": name} for name, tensor in tensors.items()}
    known |= {id(step.call): {"piece": step.distinct} for step in program.pieces}
    return {"pieces": _piece_keys(program), "bound": _save_fields(bound, known)}


def restore_program(
    saved: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device
) -> BoundProgram:
    """Returns a saved program for a tower's parameters on a device. StartFileError: it is no saved program, a
    piece is not in Inductor's cache, or the tower has no such parameter.
    """
    try:
        pieces = [_load_piece(key, guards) for key, guards in saved["pieces"]]
        bound: BoundProgram = _Loader(pieces, tensors, device).load_fields(BoundProgram, saved["bound"])
        program = bound.program
        parts = ((program, Program), (program.padding, PaddingReport), (program.derived, DerivedParameters))
        for part, kind in (*parts, *((step, Step) for step in program.steps)):
            if not isinstance(part, kind):
                raise TypeError(f"expected a {kind.__name__}; got {part!r}")
        return bound
    except (KeyError, TypeError, ValueError, AttributeError, ImportError) as error:
        if isinstance(error, StartFileError):
            raise
        raise StartFileError(f"program: expected one that was saved; got {error!r}") from error


def _piece_keys(program: Program) -> list[tuple[str, str]]:
    from fxsplit_encoder._torch.inductor_cache import key_of

    calls = {step.distinct: step.call for step in program.pieces}
    keys = []
    for number in range(len(calls)):
        call = calls[number]
        key = key_of(call.compiled) if isinstance(call, CompiledPiece) else None
        if key is None:
            raise CompileError("a piece is not in Inductor's cache")
        keys.append(key)
    return keys


def _load_piece(key: str, guards: str) -> CompiledPiece:
    from fxsplit_encoder._torch.inductor_cache import load_graph

    compiled = load_graph(key, guards)
    if compiled is None:
        raise StartFileError(f"piece: expected {key} in Inductor's cache; got none")
    return CompiledPiece(compiled)


def _fields(kind: Any) -> tuple[str, ...] | None:
    """Returns the fields to save of a dataclass or named tuple of this library; None for other classes."""
    if not (isinstance(kind, type) and kind.__module__.startswith(_OWN)) or kind in _NOT_BY_FIELDS:
        return None
    if getattr(import_module(kind.__module__), kind.__qualname__, None) is not kind:
        return None
    if not is_dataclass(kind):
        names: tuple[str, ...] | None = getattr(kind, "_fields", None)
        return names
    left_out: tuple[str, ...] = _NOT_SAVED.get(kind, ())  # type: ignore[arg-type]
    return tuple(each.name for each in fields(kind) if each.name not in left_out)


def _save_fields(value: Any, known: Mapping[int, Any]) -> dict[str, Any]:
    return {name: _save(getattr(value, name), known) for name in _fields(type(value)) or ()}


def _save(value: Any, known: Mapping[int, Any]) -> Any:
    """Returns a value as JSON; `known` has the forms of parameters and compiled pieces, by id."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if id(value) in known:
        return known[id(value)]
    if type(value) in (list, tuple, frozenset):
        values = sorted(value) if isinstance(value, frozenset) else value
        return {type(value).__name__: [_save(each, known) for each in values]}
    if isinstance(value, Mapping):
        return {"dict": {name: _save(each, known) for name, each in value.items()}}
    if isinstance(value, DerivedParameters):
        return {"derived": [_save_recipe(recipe, known) for recipe in value.recipes]}
    kind = type(value)
    if _fields(kind) is not None:
        return {"own": [kind.__module__, kind.__qualname__, _save_fields(value, known)]}
    return _save_leaf(value)


def _save_leaf(value: Any) -> dict[str, Any]:
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, Ref):
        return {"slot": value.slot}
    if isinstance(value, Size):
        check_arithmetic(value.source, value.symbols)
        return {"size": [value.shown, value.source, list(value.symbols)]}
    if isinstance(value, _TORCH_VALUES):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, OpOverload):
        return {"operator": str(value.name())}
    if isinstance(value, Tensor):
        raise CompileError("it reads a tensor that is no parameter and no buffer of the tower")
    if isinstance(value, HostOp):
        raise CompileError("it computes metadata on the host")
    raise CompileError(f"it has an argument that has no name, a {type(value).__name__}")


def _save_recipe(recipe: DerivedParameter, known: Mapping[int, Any]) -> dict[str, Any]:
    make: Any = recipe.make
    args, kwargs = (), {}
    if isinstance(make, functools.partial):
        make, args, kwargs = make.func, make.args, make.keywords
    module, name = make.__module__, make.__qualname__
    if not module.startswith(_OWN) or getattr(import_module(module), name, None) is not make:
        raise CompileError(f"a parameter is derived by {module}.{name}, which has no name of this library's")
    saved = {"slot": recipe.slot, "sources": recipe.sources, "is_kept": recipe.is_kept}
    return {**saved, "make": [module, name], "args": _save(args, known), "kwargs": _save(kwargs, known)}


class _Loader:
    """Restores what `_save` has written, with pieces by number and the tower's tensors by name."""

    def __init__(
        self, pieces: Sequence[CompiledPiece], tensors: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._kinds: Mapping[str, Callable[[Any], Any]] = {
            "list": lambda values: [*map(self.load, values)],
            "tuple": lambda values: tuple(map(self.load, values)),
            "frozenset": lambda values: frozenset(map(self.load, values)),
            "dict": lambda value: {name: self.load(each) for name, each in value.items()},
            "float": float,
            "slot": Ref,
            "size": _size,
            "torch": _torch_value,
            # The device where the program runs, or the host.
            "device": lambda kind: device if kind == device.type else torch.device(kind),
            "operator": _operator,
            "piece": pieces.__getitem__,
            "parameter": self._parameter,
            "derived": lambda recipes: DerivedParameters(map(self._recipe, recipes)),
            "own": lambda value: self.load_fields(_own_class(*value[:2]), value[2]),
        }

    def load(self, saved: Any) -> Any:
        if saved is None or isinstance(saved, bool | int | str):
            return saved
        ((kind, value),) = saved.items()
        if kind not in self._kinds:
            raise ValueError(f"no argument: {saved}")
        return self._kinds[kind](value)

    def load_fields(self, kind: Any, saved: Mapping[str, Any]) -> Any:
        given = {"constants": {}, "device": self._device} if kind is Program else {}
        return kind(**{name: self.load(saved[name]) for name in _fields(kind) or ()}, **given)

    def _parameter(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise StartFileError(
                f"parameters: expected {name}, which the program reads; got a tower without it"
            )
        return self._tensors[name]

    def _recipe(self, saved: Mapping[str, Any]) -> DerivedParameter:
        module, name = saved["make"]
        make: Any = getattr(import_module(module), name) if module.startswith(_OWN) else None
        # What a module of ours has imported is not ours.
        if not isinstance(make, FunctionType) or make.__module__ != module:
            raise ValueError(f"make: expected a function of {_OWN[:-1]}; got {module}.{name}")
        args, kwargs = self.load(saved["args"]), self.load(saved["kwargs"])
        filled: Callable[..., Tensor] = functools.partial(make, *args, **kwargs) if args or kwargs else make
        return DerivedParameter(saved["slot"], tuple(saved["sources"]), filled, saved["is_kept"])


def _own_class(module: str, name: str) -> Any:
    kind: Any = getattr(import_module(module), name) if module.startswith(_OWN) else None
    if _fields(kind) is None:
        raise ValueError(f"no dataclass of {_OWN[:-1]}: {module}.{name}")
    return kind


def _operator(name: str) -> Any:
    """Returns the overload of a name such as "aten::add.Tensor"."""
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")


def _size(content: Sequence[Any]) -> Size:
    shown, source, symbols = content
    check_arithmetic(source, symbols)
    return Size(shown, source, tuple(symbols))


def _torch_value(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, _TORCH_VALUES):
        raise ValueError(f"no argument: {name} of torch")
    return found

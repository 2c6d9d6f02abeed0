"""A bound program as JSON, and back: what is traced, split and proved once need not be in another process.

Its pieces are found in Inductor's cache by their keys, operators by their names, and parameters by those that
they have in the tower. What cannot be said like that is not saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.compile import passes, rewriting
from fxsplit_encoder.compile.derived import DerivedParameter, DerivedParameters
from fxsplit_encoder.compile.padding import PaddingReport
from fxsplit_encoder.compile.pieces import CompiledPiece
from fxsplit_encoder.compile.program import (
    Argument,
    BoundProgram,
    Program,
    Ref,
    Step,
)
from fxsplit_encoder.compile.sizes import Size, check_arithmetic
from fxsplit_encoder.errors import CompileError, StartFileError

# Compiled pieces call operators that these register.
_REGISTERED = (passes, rewriting)

_OWN = "fxsplit_encoder."

# Fields that only explain, or that whoever restores gives.
_NOT_SAVED: Mapping[type, tuple[str, ...]] = {
    PaddingReport: ("joined", "num_nodes", "source"),
    Program: ("constants", "device"),
}


def save_program(bound: BoundProgram, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A program as JSON has it.

    Args:
        tensors: the parameters and buffers of the tower, by name.

    Raises:
        CompileError: it holds something that has no name, and what.
    """
    program = bound.program
    if program.constants:
        raise CompileError("the graph holds tensors of its own")
    names = {id(tensor): name for name, tensor in tensors.items()}
    return {
        "names": list(bound.names),
        "fixed": [_name_of(tensor, names) for tensor in bound.fixed],
        "numbers": [list(number) for number in bound.numbers],
        "pieces": _piece_keys(program),
        **_save_fields(
            program,
            steps=[_save_step(step) for step in program.steps],
            padding=_save_fields(program.padding),
            derived=[_save_recipe(recipe) for recipe in program.derived.recipes],
        ),
    }


def restore_program(
    saved: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device
) -> BoundProgram:
    """The program that was saved, on a tower's parameters.

    Args:
        tensors: as for `save_program`.
        device: where it runs.

    Raises:
        StartFileError: it is not what `save_program` writes, a piece is not in Inductor's cache, or the tower
            has no such parameter.
    """
    try:
        return _restore(saved, tensors, device)
    except (KeyError, TypeError, ValueError, AttributeError, ImportError) as error:
        if isinstance(error, StartFileError):
            raise
        raise StartFileError(f"program: expected one that was saved; got {error!r}") from error


def _restore(saved: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> BoundProgram:
    pieces = [_load_piece(key, guards) for key, guards in saved["pieces"]]
    program = _load_fields(
        Program,
        saved,
        device,
        steps=tuple(_load_step(step, pieces, device) for step in saved["steps"]),
        padding=_load_fields(PaddingReport, saved["padding"], device),
        derived=DerivedParameters(_load_recipe(recipe, device) for recipe in saved["derived"]),
        constants={},
        device=device,
    )
    fixed = tuple(None if name is None else _tensor(tensors, name) for name in saved["fixed"])
    numbers = tuple((position, name, dim) for position, name, dim in saved["numbers"])
    return BoundProgram(program, tuple(saved["names"]), fixed, numbers)


def _save_fields(value: Any, **given: Any) -> dict[str, Any]:
    """The fields of a dataclass by name: those that are given, and others as JSON has them."""
    names = (each.name for each in fields(value) if each.name not in _NOT_SAVED.get(type(value), ()))
    return {name: given[name] if name in given else _save(getattr(value, name)) for name in names}


def _load_fields(kind: Any, saved: Mapping[str, Any], device: torch.device, /, **given: Any) -> Any:
    missing = (*given, *_NOT_SAVED.get(kind, ()))
    names = (each.name for each in fields(kind) if each.name not in missing)
    return kind(**{name: _load(saved[name], device) for name in names}, **given)


# --- parameters and pieces


def _name_of(tensor: Any, names: Mapping[int, str]) -> str | None:
    if tensor is None:
        return None
    if id(tensor) not in names:
        raise CompileError("it reads a tensor that is no parameter and no buffer of the tower")
    return names[id(tensor)]


def _tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise StartFileError(f"parameters: expected {name}, which the program reads; got a tower without it")
    return tensors[name]


def _piece_keys(program: Program) -> list[tuple[str, str]]:
    """By the number of a distinct compilation, how Inductor's cache finds it."""
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


# --- steps


def _save_step(step: Step) -> dict[str, Any]:
    if step.kind == "host":
        raise CompileError("it computes metadata on the host")
    return _save_fields(step, call=None if step.kind == "piece" else _name_of_operator(step.call))


def _load_step(saved: Mapping[str, Any], pieces: Sequence[CompiledPiece], device: torch.device) -> Any:
    call = pieces[saved["distinct"]] if saved["kind"] == "piece" else _operator(saved["call"])
    return _load_fields(Step, saved, device, call=call)


def _name_of_operator(call: Any) -> str:
    return str(call.name())


def _operator(name: str) -> Any:
    """The overload of a name such as "aten::add.Tensor"."""
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")


# --- arguments

_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)
_CONTAINERS: Mapping[str, Callable[..., Any]] = {"list": list, "tuple": tuple, "frozenset": frozenset}


def _save(argument: Argument) -> Any:
    """An argument as JSON has it."""
    if argument is None or isinstance(argument, bool | int | str):
        return argument
    if isinstance(argument, float):
        return {"float": repr(argument)}
    if isinstance(argument, Ref):
        return {"slot": argument.slot}
    if isinstance(argument, Size):
        check_arithmetic(argument.source, argument.symbols)
        return {"size": [argument.shown, argument.source, list(argument.symbols)]}
    if type(argument) in _CONTAINERS.values():
        values = sorted(argument) if isinstance(argument, frozenset) else argument
        return {type(argument).__name__: [_save(each) for each in values]}
    if isinstance(argument, Mapping):
        return {"dict": {name: _save(each) for name, each in argument.items()}}
    if isinstance(argument, _TORCH_VALUES):
        return {"torch": str(argument).removeprefix("torch.")}
    if isinstance(argument, torch.device):
        return {"device": argument.type}
    names = _fields(type(argument))
    if names is None:
        raise CompileError(f"it has an argument that has no name, a {type(argument).__name__}")
    kind = type(argument)
    return {"own": [kind.__module__, kind.__qualname__, {n: _save(getattr(argument, n)) for n in names}]}


def _fields(kind: Any) -> tuple[str, ...] | None:
    """Of a dataclass or a named tuple of this library, that its module has by name; None: it is none."""
    if not (isinstance(kind, type) and kind.__module__.startswith(_OWN)):
        return None
    if getattr(import_module(kind.__module__), kind.__qualname__, None) is not kind:
        return None
    names = getattr(kind, "_fields", None)
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else names


def _load_own(saved: tuple[str, str, Mapping[str, Any]], device: torch.device) -> Any:
    module, name, values = saved
    kind: Any = getattr(import_module(module), name) if module.startswith(_OWN) else None
    if _fields(kind) is None:
        raise ValueError(f"no dataclass of {_OWN[:-1]}: {module}.{name}")
    return kind(**{key: _load(each, device) for key, each in values.items()})


def _load(saved: Any, device: torch.device) -> Argument:
    if saved is None or isinstance(saved, bool | int | str):
        return saved
    ((kind, value),) = saved.items()
    if kind == "slot":
        return Ref(value)
    if kind == "size":
        return Size.restored(*value)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_load(each, device) for each in value)
    if kind == "dict":
        return {name: _load(each, device) for name, each in value.items()}
    if kind == "float":
        return float(value)
    if kind == "own":
        return _load_own(value, device)
    if kind == "device":  # that kind of device: the one where the program runs, or the host
        return device if value == device.type else torch.device(value)
    found = getattr(torch, value) if kind == "torch" else None
    if not isinstance(found, _TORCH_VALUES):
        raise ValueError(f"no argument: {saved}")
    return found


# --- derived parameters


def _save_recipe(recipe: DerivedParameter) -> dict[str, Any]:
    make: Any = recipe.make
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(make, functools.partial):
        make, args, kwargs = make.func, make.args, make.keywords
    module, name = make.__module__, make.__qualname__
    if not module.startswith(_OWN) or getattr(import_module(module), name, None) is not make:
        raise CompileError(f"a parameter is derived by {module}.{name}, which has no name of this library's")
    return {
        "slot": recipe.slot,
        "sources": list(recipe.sources),
        "is_kept": recipe.is_kept,
        "make": [module, name],
        "args": [_save(each) for each in args],
        "kwargs": {key: _save(each) for key, each in kwargs.items()},
    }


def _load_recipe(saved: Mapping[str, Any], device: torch.device) -> DerivedParameter:
    module, name = saved["make"]
    if not module.startswith(_OWN):
        raise ValueError(f"make: expected a function of {_OWN[:-1]}; got {module}.{name}")
    make: Callable[..., Tensor] = getattr(import_module(module), name)
    args = [_load(each, device) for each in saved["args"]]
    kwargs = {key: _load(each, device) for key, each in saved["kwargs"].items()}
    if args or kwargs:
        make = functools.partial(make, *args, **kwargs)
    return DerivedParameter(saved["slot"], tuple(saved["sources"]), make, saved["is_kept"])

"""Saves a bound program and restores it in another process, without another trace.

A program is pickled; what another process has already is written by name: the tower's parameters, operators,
and compiled pieces by their keys in Inductor's cache. Loading a pickle may run code, as a start file may.
"""

from __future__ import annotations

import base64
import functools
import pickle
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.dispatch import OpOverload
from fxsplit_encoder.compile import passes, rewriting
from fxsplit_encoder.compile.branches import Step
from fxsplit_encoder.compile.options import HostOp
from fxsplit_encoder.compile.pieces import CompiledPiece
from fxsplit_encoder.compile.program import BoundProgram
from fxsplit_encoder.errors import CompileError, StartFileError

# Compiled pieces call operators that these register.
_REGISTERED = (passes, rewriting)

# What unpickling raises of bytes that are no program.
_OF_LOADING = (pickle.PickleError, AttributeError, EOFError, ImportError, LookupError, TypeError, ValueError)


def save_program(bound: BoundProgram, tensors: Mapping[str, Tensor]) -> str:
    """Returns a program as text; `tensors` are the tower's parameters and buffers by name. CompileError: it
    holds an object that has no name.
    """
    if bound.program.constants:
        raise CompileError("the graph holds tensors of its own")
    pickled = BytesIO()
    pickler = _Pickler(pickled, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.known = {id(tensor): ("parameter", name) for name, tensor in tensors.items()}
    pickler.known |= {id(step.call): ("piece", *_key_of(step)) for step in bound.program.pieces}
    try:
        pickler.dump(replace(bound))  # without cached properties
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CompileError(f"it holds an object that has no name: {error}") from error
    return base64.b64encode(pickled.getvalue()).decode()


def restore_program(saved: str, tensors: Mapping[str, Tensor], device: torch.device) -> BoundProgram:
    """Returns a saved program for a tower's parameters on a device. StartFileError: it is no saved program, a
    piece is not in Inductor's cache, or the tower has no such parameter.
    """
    try:
        unpickler = _Unpickler(BytesIO(base64.b64decode(saved)))
        unpickler.tensors, unpickler.device = tensors, device
        bound = unpickler.load()
    except StartFileError:
        raise
    except _OF_LOADING as error:
        raise StartFileError(f"program: expected one that was saved; got {error!r}") from error
    if not isinstance(bound, BoundProgram):
        raise StartFileError(f"program: expected one that was saved; got a {type(bound).__name__}")
    return bound


class _Pickler(pickle.Pickler):
    known: dict[int, tuple[str, ...]]
    """Names of parameters and compiled pieces, by id."""

    def persistent_id(self, value: Any) -> tuple[str, ...] | None:
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, OpOverload):
            return "operator", str(value.name())
        if isinstance(value, torch.device):
            return "device", value.type
        if isinstance(value, Tensor):
            raise CompileError("it reads a tensor that is no parameter and no buffer of the tower")
        if isinstance(value, HostOp):
            raise CompileError("it computes metadata on the host")
        return None


class _Unpickler(pickle.Unpickler):
    tensors: Mapping[str, Tensor]
    device: torch.device

    def persistent_load(self, found: tuple[str, ...]) -> Any:
        kind, name, *guards = found
        if kind == "operator":
            return _operator(name)
        if kind == "device":  # the one where the program runs, or the host
            return self.device if name == self.device.type else torch.device(name)
        if kind == "piece":
            return self._piece(name, *guards)
        if name not in self.tensors:
            raise StartFileError(
                f"parameters: expected {name}, which the program reads; got a tower without it"
            )
        return self.tensors[name]

    @functools.cached_property
    def _piece(self) -> Any:
        return functools.cache(_load_piece)


def _key_of(step: Step) -> tuple[str, str]:
    """Returns the key of a step's piece in Inductor's cache, and its guards."""
    from fxsplit_encoder._torch.inductor_cache import key_of

    key = key_of(step.call.compiled) if isinstance(step.call, CompiledPiece) else None
    if key is None:
        raise CompileError("a piece is not in Inductor's cache")
    return key


def _load_piece(key: str, guards: str) -> CompiledPiece:
    from fxsplit_encoder._torch.inductor_cache import load_graph

    compiled = load_graph(key, guards)
    if compiled is None:
        raise StartFileError(f"piece: expected {key} in Inductor's cache; got none")
    return CompiledPiece(compiled)


def _operator(name: str) -> Any:
    """Returns the overload of a name such as "aten::add.Tensor"."""
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")

"""An eager step made of any function: what it is called with at every replay, and where its results lie.

A function that breaks a capture may return tensors, None, numbers and strings, in tuples, lists and dicts:

    a new tensor                  is copied into a buffer at a fixed address
    memory of an argument         stays that: the function wrote it in place, or returned a view
    None, a number, a string      is part of the recording; another value at a replay is an error
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.dispatch import (
    OpOverload,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from fxsplit_encoder.capture.memory import OwnedBuffers, storage_address, unstrided
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.errors import CaptureError, ReplayError

CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
"""What may be a part of a recording beside tensors."""


class RecordedBreak:
    """A call that is repeated at every replay over the same arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        pool: GraphPool,
        buffers: OwnedBuffers,
    ) -> None:
        self.name = name_of(function)
        self._function = function
        self._args, self._kwargs = tree_map_only(torch.Tensor, pool.hold, (tuple(args), dict(kwargs)))
        self._arguments = {
            storage_address(leaf)
            for leaf in tree_leaves((self._args, self._kwargs))
            if isinstance(leaf, torch.Tensor) and unstrided([leaf]) is None
        }
        self._buffers = buffers
        self._takers: list[Callable[[Any], None]] = []

    def first_run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the function with the arguments themselves and fixes where its results lie; returns those.

        Raises:
            CaptureError: it returned something else than a break may.
        """
        leaves, self._structure = tree_flatten(self._function(*args, **kwargs))
        fixed: dict[int, tuple[Any, Callable[[Any], None]]] = {}
        for leaf in leaves:
            if id(leaf) not in fixed:
                fixed[id(leaf)] = self._fix(leaf)
        self._takers = [fixed[id(leaf)][1] for leaf in leaves]
        return tree_unflatten([fixed[id(leaf)][0] for leaf in leaves], self._structure)

    def __call__(self) -> None:
        """Repeats the call.

        Raises:
            ReplayError: its results are not as they were at the capture.
        """
        leaves, structure = tree_flatten(self._function(*self._args, **self._kwargs))
        if structure != self._structure:
            raise ReplayError(
                f"{self.name}: returned {structure}; the capture was recorded with {self._structure}"
            )
        for take, leaf in zip(self._takers, leaves, strict=True):
            take(leaf)

    def _fix(self, result: Any) -> tuple[Any, Callable[[Any], None]]:
        """Where a result lies from now on, and what brings a later one there."""
        if isinstance(result, torch.Tensor):
            if (kind := unstrided([result])) is not None:
                raise CaptureError(f"{self.name}: returned a {kind} tensor; a break may return strided ones")
            address = storage_address(result)
            if address and address in self._arguments:
                return result, self._expecting(_place(result), _place)
            buffer, handed_out = self._buffers.acquire(result)
            buffer.copy_(result)
            return handed_out, self._copying_into(buffer)
        if isinstance(result, CONSTANTS):
            return result, self._expecting(result, lambda value: value)
        raise CaptureError(
            f"{self.name}: returned a {type(result).__name__}; a break may return tensors, None, numbers and "
            "strings, in tuples, lists and dicts"
        )

    # What takes a result must not hold the step: in a cycle, buffers would outlive a release until garbage is
    # collected.

    def _expecting(self, expected: Any, aspect: Callable[[Any], Any]) -> Callable[[Any], None]:
        name = self.name

        def compare(result: Any) -> None:
            got = aspect(result)
            # A NaN differs from itself, and is what it was.
            if got != expected and not (got != got and expected != expected):
                raise ReplayError(f"{name}: returned {got!r}; the capture was recorded with {expected!r}")

        return compare

    def _copying_into(self, buffer: Tensor) -> Callable[[Any], None]:
        name = self.name

        def copy(result: Any) -> None:
            if _kind(result) != _kind(buffer):
                raise ReplayError(
                    f"{name}: returned {_kind(result)}; the capture was recorded with {_kind(buffer)}"
                )
            buffer.copy_(result)

        return copy


def name_of(function: Any) -> str:
    """What a function or op is called in messages."""
    if isinstance(function, OpOverload):
        return str(function.name())  # type: ignore[no-untyped-call]
    return getattr(function, "__qualname__", None) or type(function).__name__


def _place(result: Any) -> tuple[object, ...]:
    if not isinstance(result, torch.Tensor):
        return (type(result).__name__,)
    return (hex(result.data_ptr()), *_kind(result), result.stride())


def _kind(result: Any) -> tuple[object, ...]:
    if not isinstance(result, torch.Tensor) or unstrided([result]) is not None:
        return (type(result).__name__,)
    return tuple(result.shape), result.dtype, result.device

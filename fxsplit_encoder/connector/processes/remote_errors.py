"""Errors that cross from one process to another keep their class and their message.

Only classes of this library's tree, torch's error for memory that ran out, and Python's own come back as
themselves. Another comes back as the nearest of its bases that is one of these, with its name in the message.
"""

from __future__ import annotations

import builtins
import inspect
import traceback
from typing import Any

import torch

from fxsplit_encoder import errors
from fxsplit_encoder.connector.processes.messages import WireError

_MOST_CHARACTERS = 1 << 16


def _classes(module: Any, base: type[Exception]) -> dict[str, type[Exception]]:
    found = {name: value for name, value in vars(module).items() if inspect.isclass(value)}
    return {name: value for name, value in found.items() if issubclass(value, base)}


KNOWN: dict[str, type[Exception]] = {
    **_classes(builtins, Exception),
    "OutOfMemoryError": torch.OutOfMemoryError,
    **_classes(errors, errors.FxSplitError),
}
"""By name, the classes that come back as themselves."""


def to_wire(error: BaseException) -> WireError:
    """An error as plain values, with where it was raised."""
    kind = next(cls for cls in type(error).__mro__ if KNOWN.get(cls.__name__) is cls or cls is BaseException)
    is_itself = kind is type(error)
    text = str(error) if is_itself else f"{type(error).__name__}: {error}"
    plain = [_cut(value) for value in error.args if isinstance(value, bool | int | float | str)]
    arguments = plain if is_itself and len(plain) == len(error.args) else [_cut(text)]
    where = "".join(traceback.format_exception(error))
    return WireError(kind.__name__, arguments, _cut(text), _cut(where))


def _cut(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > 63:
        return str(value)
    return value[:_MOST_CHARACTERS] if isinstance(value, str) else value


def from_wire(wire: WireError, pid: int) -> Exception:
    """The error that `to_wire` was given, with a note of what happened in the other process.

    Args:
        wire: what came.
        pid: of the process that sent it.
    """
    error = _rebuilt(wire)
    error.add_note(f"In the encoder process {pid}:\n{wire.traceback}")
    return error


def _rebuilt(wire: WireError) -> Exception:
    kind = KNOWN.get(wire.kind)
    if kind is None:
        return RuntimeError(f"{wire.kind}: {wire.text}")
    try:
        return kind(*wire.arguments)
    except Exception:  # a class that is made from other things than a message
        return RuntimeError(f"{wire.kind}: {wire.text}")

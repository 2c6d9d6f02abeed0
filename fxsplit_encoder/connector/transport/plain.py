"""What travels beside tensors, as values that any message takes, and back.

Tuples, small tensors and arrays come back as what they were: each is a mapping with the single key "", which
no other mapping may have.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

from fxsplit_encoder.connector.transport.layout import DTYPES
from fxsplit_encoder.errors import InputError, TransportError
from fxsplit_encoder.messages import name_of, shown

_DEEPEST = 16
_MOST_ARRAY_BYTES = 1 << 20
_MARK = ""


def to_plain(value: object, name: str = "meta", depth: int = 0) -> Any:
    """A value as None, booleans, numbers, strings, bytes, and lists and mappings of them.

    Args:
        value: of these, tuples, and tensors and arrays of up to 1 MiB.
        name: what messages call it.
        depth: how many containers it is in.

    Raises:
        InputError: it is, or holds, anything else.
    """
    if depth > _DEEPEST:
        raise InputError(f"{name}: expected at most {_DEEPEST} containers in one another")
    if isinstance(value, Mapping):
        return {_key(key, name): to_plain(v, f"{name}.{name_of(key)}", depth + 1) for key, v in value.items()}
    if isinstance(value, list | tuple):
        entries = [to_plain(entry, name, depth + 1) for entry in value]
        return {_MARK: ["tuple", entries]} if isinstance(value, tuple) else entries
    if isinstance(value, np.generic | Enum):
        value = value.item() if isinstance(value, np.generic) else value.value
    if isinstance(value, torch.Tensor | np.ndarray):
        return {_MARK: _packed(value, name)}
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise InputError(f"{name}: expected an integer of 64 bits; got {shown(value)}")
    for kind in (bool, int, float, str):  # and no class of theirs
        if isinstance(value, kind):
            return kind(value)
    if value is None or isinstance(value, bytes):
        return value
    raise InputError(
        f"{name}: expected numbers, strings, small tensors, lists or mappings of them; got {shown(value)}"
    )


def _key(key: object, name: str) -> str:
    if not isinstance(key, str) or key == _MARK:
        raise InputError(f"{name}: expected names as keys; got {shown(key)}")
    return key


def _packed(value: torch.Tensor | np.ndarray[Any, Any], name: str) -> list[object]:
    kind = "tensor" if isinstance(value, torch.Tensor) else "array"
    tensor = value.detach().cpu() if isinstance(value, torch.Tensor) else _from_array(value, name)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout != torch.strided or tensor.nbytes > _MOST_ARRAY_BYTES:
        raise InputError(
            f"{name}: expected a dense tensor of at most {_MOST_ARRAY_BYTES} bytes; got {shown(value)}"
        )
    flat = tensor.contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return [kind, dtype, list(tensor.shape), data]


def _from_array(array: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(array))  # a copy: an array may be read-only
    except TypeError:
        raise InputError(f"{name}: expected an array of numbers; got {shown(array)}") from None


def from_plain(value: Any, depth: int = 0) -> Any:
    """What `to_plain` was given.

    Raises:
        TransportError: the value is not one that `to_plain` makes.
    """
    if depth > 2 * _DEEPEST:
        raise TransportError("values in a message are nested too deeply")
    if isinstance(value, list):
        return [from_plain(entry, depth + 1) for entry in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: from_plain(entry, depth + 1) for key, entry in value.items()}
    match value[_MARK]:
        case ["tuple", [*entries]]:
            return tuple(from_plain(entry, depth + 1) for entry in entries)
        case ["tensor" | "array" as kind, str(dtype), [*shape], bytes(data)] if dtype in DTYPES:
            return _unpacked(kind, DTYPES[dtype], shape, data)
    raise TransportError(f"a value in a message is of no known kind: {shown(value)}")


def _unpacked(kind: str, dtype: torch.dtype, shape: list[Any], data: bytes) -> object:
    try:
        tensor = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).view(dtype).view(shape)
        return tensor if kind == "tensor" else tensor.numpy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TransportError(f"an array in a message is not what it says: {error}") from None

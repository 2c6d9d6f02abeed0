"""How tensors lie in a range of bytes, the handles that name them, and plain values beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fxsplit_encoder.errors import InputError, TransportError
from fxsplit_encoder.messages import name_of, names_of, shown

ALIGNMENT = 64
"""Bytes. Every tensor begins at a multiple, as vector instructions like it."""

MOST_TENSORS = 1 << 14
MOST_DIMENSIONS = 16
_MOST_BYTES = 1 << 47

_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 "
    "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
"""What can be handed over, by the name that goes with it."""

_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorLayout:
    """One tensor in a range of bytes, contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """From the beginning of the range, in bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def view(self, memory: Tensor) -> Tensor:
        """The tensor in the range (bytes,) in which it lies."""
        part = memory[self.offset : self.offset + self.num_bytes]
        return part.view(DTYPES[self.dtype]).view(self.shape)


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def lay_out(buffers: Mapping[str, Tensor], start: int = 0) -> tuple[tuple[TensorLayout, ...], int]:
    """Where each tensor lies in a range, and the length of the range.

    Raises:
        InputError: one is no plain tensor, or there are too many.
    """
    if len(buffers) > MOST_TENSORS:
        raise InputError(f"buffers: expected at most {MOST_TENSORS} tensors; got {len(buffers)}")
    layouts: list[TensorLayout] = []
    end = aligned(start)
    for name, tensor in buffers.items():
        _check_tensor(name, tensor)
        layout = TensorLayout(name, _NAME_OF[tensor.dtype], tuple(tensor.shape), end)
        layouts.append(layout)
        end = aligned(end + layout.num_bytes)
    return tuple(layouts), end


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(name, str):
        raise InputError(f"buffers: expected names as keys; got {shown(name)}")
    if not isinstance(tensor, Tensor):
        raise InputError(f"buffers.{name_of(name)}: expected a tensor; got {shown(tensor)}")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested or tensor.dtype not in _NAME_OF:
        raise InputError(
            f"buffers.{name_of(name)}: expected a dense tensor with values, of a dtype of whole bytes; "
            f"got {tensor.layout}, {tensor.dtype}, on {tensor.device}"
        )
    if tensor.dim() > MOST_DIMENSIONS:
        raise InputError(
            f"buffers.{name_of(name)}: expected at most {MOST_DIMENSIONS} dimensions; got {tensor.dim()}"
        )


def check_layouts(layouts: Sequence[TensorLayout], start: int, num_bytes: int) -> None:
    """That layouts which another process sent lie in a range; raises TransportError where one does not."""
    if len(layouts) > MOST_TENSORS:
        raise TransportError(f"a handle of {len(layouts)} tensors; expected at most {MOST_TENSORS}")
    for layout in layouts:
        if not _is_sound(layout) or layout.offset < start or layout.offset + layout.num_bytes > num_bytes:
            raise TransportError(
                f"a tensor that was handed over does not lie in its {num_bytes} bytes: {shown(layout)}"
            )


def _is_sound(layout: TensorLayout) -> bool:
    return (
        layout.dtype in DTYPES
        and len(layout.shape) <= MOST_DIMENSIONS
        and all(0 <= size <= _MOST_BYTES for size in layout.shape)
        and layout.offset % ALIGNMENT == 0
        and layout.num_bytes <= _MOST_BYTES
    )


def copy_out(sources: Mapping[str, Tensor], into: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Copies of tensors, in memory of their own or in tensors that are given.

    Args:
        sources: by name.
        into: of the same names, shapes and dtypes; None: new ones.

    Raises:
        InputError: `into` does not fit; nothing was copied.
    """
    if into is None:
        targets = {
            name: torch.empty_like(source, memory_format=torch.contiguous_format)
            for name, source in sources.items()
        }
    else:
        targets = dict(into)
        _check_targets(sources, targets)
    with torch.no_grad():
        for name, source in sources.items():
            targets[name].copy_(source)
    return targets


def _check_targets(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    if sources.keys() != targets.keys():
        raise InputError(f"into: expected {names_of(sources)}; got {names_of(targets)}")
    for name, source in sources.items():
        target = targets[name]
        if target.shape != source.shape or target.dtype != source.dtype:
            raise InputError(
                f"into.{name}: expected {tuple(source.shape)} {source.dtype}; "
                f"got {tuple(target.shape)} {target.dtype}"
            )


@dataclass(frozen=True)
class Handle:
    """Where buffers that were put lie. Plain values only, so that it fits into any message."""

    owner: str
    """Names the transport that holds them."""
    number: int
    """Names them there; never given twice."""
    key: bytes
    offset: int
    """Of what was put, in the owner's memory, in bytes."""
    tensors: tuple[TensorLayout, ...]
    meta: Mapping[str, object] = field(default_factory=dict)
    checksum: bytes = b""
    """Of the bytes, where the owner was asked for it; else empty."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


class Payload(NamedTuple):
    """What was put, as `get` gives it."""

    buffers: Mapping[str, Tensor]
    meta: Mapping[str, Any]


_DEEPEST = 16
_MOST_ARRAY_BYTES = 1 << 20
_MARK = ""


def to_plain(value: object, name: str = "meta", depth: int = 0) -> Any:
    """A value as None, booleans, numbers, strings, bytes, and lists and mappings of them.

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
    """What `to_plain` was given; raises TransportError where the value is not one that `to_plain` makes."""
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

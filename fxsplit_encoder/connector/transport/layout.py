"""How tensors lie one after another in a range of bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

    Args:
        buffers: by name.
        start: bytes that are kept free at the beginning.

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
    """That layouts which another process sent lie in a range.

    Args:
        layouts: as they came.
        start: where the first may begin, in bytes.
        num_bytes: the length of the range.

    Raises:
        TransportError: one does not.
    """
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


def copy_out(
    sources: Mapping[str, Tensor], into: Mapping[str, Tensor] | None, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Copies of tensors, in memory of their own or in tensors that are given.

    Args:
        sources: by name.
        into: of the same names, shapes and dtypes; None: new ones.
        device: that of new ones; None: where the sources are.

    Raises:
        InputError: `into` does not fit; nothing was copied.
    """
    if into is None:
        targets = {
            name: torch.empty(source.shape, dtype=source.dtype, device=device or source.device)
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

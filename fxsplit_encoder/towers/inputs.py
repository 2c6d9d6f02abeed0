"""Reads tensors of pixels of a request, and the integers that describe them. Only integers' values are read,
in rows of a known width, after `number_of` has counted them: too many are refused without an allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fxsplit_encoder.capture.buffers import gibibytes, memory_of
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import shown

MOST_ROWS = 2**31 - 1
"""Rows of a batch: cumulative lengths count them in 32 bits."""

MOST_PLANNED_ITEMS = 1 << 14
"""The most items of a plan without pixels."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
_REAL = INTEGERS.union(_FLOATS)

# A wrong tensor of so few entries is shown with them.
_FEW = 16

# Up to this many elements the memory is not asked for.
_MANY = 1 << 24

ONLY_INTEGERS = {int}


# --- pixels


def pixel_parts(value: Any, name: str, check: Callable[[Any, str], None] | None = None) -> list[Tensor]:
    """The tensors of an input of pixels: one, a list or None. `check` raises InputError for a wrong part."""
    if value is None:
        return []
    parts = value if isinstance(value, list | tuple) else (value,)
    for part in parts:
        (check or check_pixels)(part, name)
    return list(parts)


def check_pixels(value: Any, name: str) -> None:
    """Raises InputError unless an input is a dense tensor of real numbers, in rows, with data."""
    if not isinstance(value, torch.Tensor):
        hint = "; pass torch.from_numpy of it" if isinstance(value, np.ndarray) else ""
        raise InputError(f"{name}: expected a tensor; got {shown(value)}{hint}")
    if value.layout != torch.strided or value.is_nested:
        raise InputError(
            f"{name}: expected a dense tensor; got one of layout {value.layout}; pass to_dense()"
        )
    if value.dtype not in _REAL:
        raise InputError(
            f"{name}: expected floating point numbers of 16 bits or more, or integers of 8 to 64 bits with a "
            f"sign or uint8; got {value.dtype}"
        )
    if value.dim() == 0:
        raise InputError(f"{name}: expected rows of pixels; got a tensor without dimensions")
    if value.is_meta and value.device.type == "meta":
        raise InputError(f"{name}: expected pixels; got a tensor on the meta device, which has no data")
    # An expanded tensor may have more elements than any memory.
    if value.numel() > _MANY and (value.shape[0] > MOST_ROWS or value.nbytes > memory_of(value.device)):
        raise InputError(
            f"{name}: expected at most {MOST_ROWS} rows, and {gibibytes(memory_of(value.device))} in all, "
            f"the memory of {value.device}; got {tuple(value.shape)} in {value.dtype}"
        )


def one_or_several(parts: list[Tensor]) -> Tensor | list[Tensor]:
    """A single tensor by itself; several as they are, whose rows follow one another."""
    return parts[0] if len(parts) == 1 else parts


def rows_of(tensors: Sequence[Tensor], starts: Sequence[int], items: Sequence[int]) -> list[Tensor]:
    """Views of the rows of some items, one for each run of neighbors. `tensors` hold the rows of all items in
    order; `starts` are the first row of every item, then the number of rows.
    """
    spans: list[list[int]] = []
    for item in items:
        start, end = starts[item], starts[item + 1]
        if spans and spans[-1][1] == start:
            spans[-1][1] = end
        else:
            spans.append([start, end])
    parts = []
    for start, end in spans:
        offset = 0
        for tensor in tensors:
            first, last = max(start - offset, 0), min(end - offset, tensor.shape[0])
            if first < last:
                parts.append(tensor[first:last])
            offset += tensor.shape[0]
    return parts or [tensors[0][:0]]


# --- integers


def number_of(value: Any) -> int:
    """Rows of an input of integers, without reading it; 0 for any other value."""
    if isinstance(value, list | tuple):
        return len(value)
    if not isinstance(value, torch.Tensor | np.ndarray) or (
        isinstance(value, torch.Tensor) and value.is_nested
    ):
        return 0
    shape = value.shape
    return int(shape[0]) if shape else 0


def check_integers(value: Any, name: str) -> None:
    """Raises InputError unless an input is a tensor of integers. Its values are not read."""
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{name}: expected a tensor of integers; got {shown(value)}")
    if value.dtype not in INTEGERS or not _is_readable(value):
        raise InputError(f"{name}: expected a tensor of integers; got {value.dtype}, {value.layout}")


def integer_rows(value: Any, name: str, columns: int, expected: str) -> list[tuple[int, ...]]:
    """Rows of `columns` integers of 64 bits as Python's own; a tensor on a device costs one synchronization.

    Args:
        value: (rows, columns): a tensor, an array or nested sequences; (rows,) is enough for one column.
        name, expected: of the input and of its rows, for the message of the InputError.
    """
    if isinstance(value, torch.Tensor) and value.dtype in INTEGERS and _is_readable(value):
        if value.shape[1:] == (columns,):
            return [tuple(row) for row in value.tolist()]
    listed = _listed(value, number_of(value) * columns, name, expected)
    if not isinstance(listed, list | tuple):
        _refuse(listed, name, expected)
    rows: list[tuple[int, ...]] = []
    for given in listed:
        if type(given) is tuple and len(given) == columns and _are_integers(given):
            rows.append(given)
            continue
        row = _listed(given, columns, name, expected)
        if columns == 1 and not isinstance(row, list | tuple):
            row = (row,)
        if not isinstance(row, list | tuple) or len(row) != columns:
            _refuse(row, name, expected)
        shown_with = row if columns > 1 else listed
        rows.append(tuple([_integer(number, shown_with, name, expected) for number in row]))
    return rows


def _listed(value: Any, most: int, name: str, expected: str) -> Any:
    """A tensor or an array of at most this many entries as lists; other values as they are."""
    if isinstance(value, torch.Tensor):
        if not _is_readable(value) or value.numel() > max(most, _FEW):
            _refuse(value, name, expected)
        return value.tolist()
    if isinstance(value, np.ndarray | np.generic):
        if value.size > max(most, _FEW):
            _refuse(value, name, expected)
        return value.tolist()
    return value


def _is_readable(value: Tensor) -> bool:
    # A fake tensor is a meta tensor that says it is on another device.
    is_meta = value.is_meta and value.device.type == "meta"
    return value.layout == torch.strided and not value.is_nested and not is_meta


def _are_integers(numbers: Sequence[Any]) -> bool:
    """Whether all are Python's own integers of 64 bits; a check of one at a time takes longer."""
    return set(map(type, numbers)) == ONLY_INTEGERS and -(2**63) <= min(numbers) and max(numbers) < 2**63


def _integer(number: Any, row: Sequence[Any], name: str, expected: str) -> int:
    kind = type(number)
    if kind is bool or (kind is not int and not isinstance(number, Integral)):
        _refuse(row, name, expected)
    value = int(number)
    if not -(2**63) <= value < 2**63:
        raise InputError(f"{name}: expected {expected}, each of 64 bits; got {shown(row)}")
    return value


def _refuse(value: Any, name: str, expected: str) -> NoReturn:
    raise InputError(f"{name}: expected {expected}; got {shown(value)}")


# --- uint8


class PixelValues:
    """Normalizes uint8 pixels on a device to the values of the processor on the host: (channels, 256)
    `values`, see `Preparer.values`.
    """

    def __init__(self, values: NDArray[np.float32], dtype: torch.dtype, device: torch.device) -> None:
        self._channels = len(values)
        self.table = torch.from_numpy(values).flatten().to(device=device, dtype=dtype)
        """(channels * 256,)."""
        self._starts = torch.arange(self._channels, dtype=torch.int32, device=device)[:, None] * 256

    def __call__(self, pixels: Tensor) -> Tensor:
        """Pixels of any layout in which the channels come first in each row."""
        if not pixels.shape[0]:
            return self.table.new_empty(pixels.shape)
        entries = pixels.reshape(pixels.shape[0], self._channels, -1).int() + self._starts
        return self.table.index_select(0, entries.flatten()).view(pixels.shape)

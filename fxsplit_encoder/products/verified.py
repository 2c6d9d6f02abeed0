"""Products whose rows are seen to get the same bits, whatever their number: at which counts a library may
multiply, and where our own kernel has to.

A library chooses its algorithm by the number of rows. Most of them add along the inner dimension in the same
order; which do is not documented, so nothing is taken on trust: before a layer multiplies at some count of
rows, that count is tried on random rows, and every row has to get the bits that it got among other rows, at
another place, at another count. Counts that were not tried are filled up to one that was.

Whether a layer is the library's at all follows from a fixed list of counts, not from those that a process
happens to see: processes on the same device with the same libraries decide alike.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxsplit_encoder.errors import CaptureError
from fxsplit_encoder.kernels import is_measuring
from fxsplit_encoder.products.layer import ALIGNMENT, Layer

Product = Callable[[Tensor, Tensor, Tensor | None, str], Tensor]

COUNTS = (16, *itertools.chain.from_iterable((3 * 2**n, 4 * 2**n) for n in range(3, 12)))
"""Rows at which every layer is tried: 16, 24, 32, 48 and so on, to 8192."""

REFERENCE_ROWS = 128

# Different rows in a trial. A prime number: each comes at every place of a tile.
_DISTINCT = 1021


def same_bits(product: Product, layer: Layer, counts: Sequence[int], *, reference_rows: int) -> bool:
    """Whether a product gives every row the same bits, among each of these numbers of rows and at any place
    there, as among `reference_rows`.
    """
    rows, matrix, bias = layer.sample(_DISTINCT)

    def computed(count: int, first: int) -> tuple[Tensor, Tensor]:
        """The product of so many rows, the first of them this one; and which they are."""
        chosen = (torch.arange(count, device=layer.device) + first) % _DISTINCT
        return product(rows[chosen], matrix, bias, layer.activation), chosen

    reference = rows.new_empty(_DISTINCT, layer.out_features)
    for first in range(0, _DISTINCT, reference_rows):
        result, chosen = computed(reference_rows, first)
        reference[chosen] = result
    for count in (reference_rows, *counts):
        differs = torch.zeros((), dtype=torch.bool, device=layer.device)
        for first in {1, count % _DISTINCT, _DISTINCT // 2, *range(0, _DISTINCT, count)}:
            result, chosen = computed(count, first)
            differs |= (result != reference[chosen]).any()
        if differs:
            return False
    return True


@dataclass(slots=True)
class _Known:
    """What is known of a layer."""

    by_library: bool
    verified: set[int] = field(default_factory=set)
    """Counts of rows at which the library gives the same bits."""
    refused: set[int] = field(default_factory=set)


class VerifiedProducts:
    """Computes linear layers on CUDA.

    Args:
        library: a product whose algorithm may depend on the number of rows.
        own: one whose algorithm does not.
        counts: of rows at which every layer is tried, increasing.
    """

    def __init__(self, library: Product, own: Product, counts: Sequence[int] = COUNTS) -> None:
        self._library = library
        self._own = own
        self._counts = tuple(counts)
        self._known: dict[Layer, _Known] = {}
        self._lock = threading.RLock()

    def __call__(self, rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """The layer, (M, N).

        Raises:
            CaptureError: a CUDA graph is being captured, and the layer has not run before.
            torch.OutOfMemoryError: there is no memory to try the layer.
        """
        rows = _aligned(rows)
        layer = Layer.of(rows, matrix, bias, activation)
        count = rows.shape[0]
        known = self._of(layer)
        if not known.by_library:
            return self._own(rows, matrix, bias, activation)
        size = self._size(layer, known, count)
        if size == count:
            return self._library(rows, matrix, bias, activation)
        out = rows.new_empty(count, layer.out_features)
        for start in range(0, count, size):
            part = rows[start : start + size]
            if part.shape[0] < size:
                part = torch.cat([part, part.new_zeros(size - part.shape[0], layer.in_features)])
            result = self._library(_aligned(part), matrix, bias, activation)
            out[start : start + size] = result[: count - start]
        return out

    def describe(self, device: torch.device) -> list[str]:
        """What was found out on a device, a line each: of the library's layers together, and of every other
        one.
        """
        known = {layer: each for layer, each in self._known.items() if layer.device == device}
        taken = [each for each in known.values() if each.by_library]
        lines = []
        if taken:
            counts = len(set.union(*(each.verified for each in taken)))
            lines.append(
                f"products: {len(taken)} layers by cuBLAS, with equal bits at {counts} counts of rows"
            )
        others = [layer for layer, each in known.items() if not each.by_library]
        return lines + [
            f"product {each}: by our own kernel: cuBLAS's bits depend on the rows" for each in others
        ]

    def choices(self, device: torch.device) -> list[str]:
        """Which layers on a device are the library's and which are not: the same on every rank."""
        return sorted(
            f"{layer}: {e.by_library}" for layer, e in self._known.items() if layer.device == device
        )

    def _of(self, layer: Layer) -> _Known:
        with self._lock:
            if layer not in self._known:
                if _is_capturing(layer.device):
                    raise CaptureError(f"fixed_linear: {layer} was not tried before it is captured")
                by_library = self._agrees(layer, self._counts)
                self._known[layer] = _Known(by_library, set(self._counts) if by_library else set())
            return self._known[layer]

    def _size(self, layer: Layer, known: _Known, count: int) -> int:
        """Of how many rows the products are that compute `count` rows."""
        if count in known.verified or count == 0:
            return count
        # What is warmed up will be captured and replayed often; other counts seldom come again.
        wanted = count if is_measuring() else _rounded(count)
        with self._lock:
            tried = known.verified | known.refused
            if wanted not in tried and not _is_capturing(layer.device):
                (known.verified if self._agrees_in_memory(layer, wanted) else known.refused).add(wanted)
        if wanted in known.verified:
            return wanted
        return min((size for size in known.verified if size >= count), default=max(known.verified))

    def _agrees(self, layer: Layer, counts: Sequence[int]) -> bool:
        try:
            return same_bits(self._library, layer, counts, reference_rows=REFERENCE_ROWS)
        except torch.OutOfMemoryError:
            raise  # it says nothing of the layer
        except RuntimeError:  # the library does not take it unsplit
            return False

    def _agrees_in_memory(self, layer: Layer, count: int) -> bool:
        try:
            return self._agrees(layer, [count])
        except torch.OutOfMemoryError:
            return False


def _aligned(rows: Tensor) -> Tensor:
    """The rows, as every trial has them: an algorithm may be chosen by alignment."""
    if rows.is_contiguous() and rows.data_ptr() % ALIGNMENT == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _rounded(count: int) -> int:
    """The next power of two, or three quarters of it."""
    power = max(16, 1 << (count - 1).bit_length())
    return power * 3 // 4 if count <= power * 3 // 4 and power > 16 else power


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

"""`fxsplit::fixed_linear`: a linear layer whose rows get the same bits however many others are with them.

    rows (M, K) @ matrix (K, N) + bias (N,), then nothing or the tanh form of GELU  ->  (M, N)

On a CPU the rows are cut into zero-padded blocks of one size. On CUDA cuBLASLt multiplies where it gives the
same bits, and our own kernel, of one tile, where it does not. cuBLASLt chooses its algorithm by the number of
rows, so each count is tried on random rows before it is used; others are padded to one that was tried. Which
layers are the library's follows from a fixed list of counts: equal processes decide alike.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fxsplit_encoder._torch.dispatch import define_op
from fxsplit_encoder._torch.modes import split_k_forbidden
from fxsplit_encoder.errors import CaptureError
from fxsplit_encoder.kernels.choice import is_measuring
from fxsplit_encoder.kernels.kernel import round_up

NOTHING = ""
GELU_TANH = "gelu_tanh"

# To how many bytes libraries ask whether a pointer is aligned, at most.
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer, as a library that chooses an algorithm for it sees it."""

    device: torch.device
    dtype: torch.dtype
    in_features: int
    out_features: int
    strides: tuple[int, ...]
    """Of the matrix, (in_features, out_features)."""
    offsets: tuple[int, ...]
    """Of the matrix and the bias, if there is one: bytes past a multiple of `ALIGNMENT`."""
    activation: str

    @classmethod
    def of(cls, rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Layer:
        """Returns the layer of a product."""
        in_features, out_features = matrix.shape
        parameters = (matrix,) if bias is None else (matrix, bias)
        offsets = tuple(each.data_ptr() % ALIGNMENT for each in parameters)
        sizes = in_features, out_features
        return cls(rows.device, rows.dtype, *sizes, matrix.stride(), offsets, activation)

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added to the product."""
        return len(self.offsets) == 2

    def sample(self, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Random rows (count, in_features), matrix and bias like this layer's, the same at every call."""
        generator = torch.Generator().manual_seed(0)

        def noise(size: int) -> Tensor:
            made = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
            return made.to(self.device, self.dtype)

        rows = noise(count * self.in_features).view(count, self.in_features)
        extents = zip((self.in_features, self.out_features), self.strides, strict=True)
        length = 1 + sum((size - 1) * stride for size, stride in extents)
        matrix = _moved(noise(length), self.offsets[0]).as_strided(
            (self.in_features, self.out_features), self.strides, self.offsets[0] // self.dtype.itemsize
        )
        bias = _moved(noise(self.out_features), self.offsets[1]) if self.has_bias else None
        if bias is not None:
            bias = bias[self.offsets[1] // self.dtype.itemsize :]
        return rows, matrix, bias

    def __str__(self) -> str:
        epilogue = ", ".join((*(("bias",) if self.has_bias else ()), *filter(None, (self.activation,))))
        of = f" ({epilogue})" if epilogue else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.in_features} to {self.out_features} in {dtype}{of}"


def activated(values: Tensor, activation: str) -> Tensor:
    """Computes the values, or their tanh GELU."""
    return F.gelu(values, approximate="tanh") if activation == GELU_TANH else values


def _moved(values: Tensor, offset: int) -> Tensor:
    return torch.cat([values.new_zeros(offset // values.element_size()), values])


def library_product(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Computes the layer by cuBLASLt without splits along the inner dimension, or raises RuntimeError."""
    # torch calls cuBLASLt for sums alone. The GELU is torch's: with one in its epilogue cuBLASLt passed every
    # trial and gave other bits at some counts of more and other rows, on an H200.
    added = bias if bias is not None else _zeros(matrix.shape[1], rows.dtype, rows.device)
    with split_k_forbidden(rows.dtype):
        product = torch.addmm(added, rows, matrix)
    return activated(product, activation)


@functools.cache
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Kept: graphs hold its address.
    return torch.zeros(size, dtype=dtype, device=device)


Product = Callable[[Tensor, Tensor, Tensor | None, str], Tensor]

COUNTS = (16, *itertools.chain.from_iterable((3 * 2**n, 4 * 2**n) for n in range(3, 12)))
"""Rows at which every layer is tried: 16, 24, 32, 48 and so on, to 8192."""

REFERENCE_ROWS = 128

# Different rows in a trial. A prime number: each comes at every place of a tile.
DISTINCT = 1021


def same_bits(product: Product, layer: Layer, counts: Sequence[int], *, reference_rows: int) -> bool:
    """Whether every row gets the same bits among each of these counts of rows as among `reference_rows`."""
    rows, matrix, bias = layer.sample(DISTINCT)

    def computed(count: int, first: int) -> tuple[Tensor, Tensor]:
        """Returns the product of `count` rows from row `first` on, and their numbers."""
        chosen = (torch.arange(count, device=layer.device) + first) % DISTINCT
        return product(rows[chosen], matrix, bias, layer.activation), chosen

    reference = rows.new_empty(DISTINCT, layer.out_features)
    for first in range(0, DISTINCT, reference_rows):
        result, chosen = computed(reference_rows, first)
        reference[chosen] = result
    for count in (reference_rows, *counts):
        differs = torch.zeros((), dtype=torch.bool, device=layer.device)
        for first in {1, count % DISTINCT, DISTINCT // 2, *range(0, DISTINCT, count)}:
            result, chosen = computed(count, first)
            differs |= (result != reference[chosen]).any()
        if differs:
            return False
    return True


class VerifiedProducts:
    """Computes linear layers on CUDA by a `library` whose algorithm may depend on the number of rows, if it
    agrees at `counts` of them, or by our `own` product.
    """

    def __init__(self, library: Product, own: Product, counts: Sequence[int] = COUNTS) -> None:
        self._library = library
        self._own = own
        self._counts = tuple(counts)
        self._tried: dict[Layer, dict[int, bool]] = {}
        """Whether the library gives the same bits, by counts of rows; empty for layers that are our own's."""
        self._lock = threading.RLock()

    def __call__(self, rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """The layer, (M, N); CaptureError if it has not run before a capture, or torch.OutOfMemoryError."""
        rows = _aligned(rows)
        layer = Layer.of(rows, matrix, bias, activation)
        count = rows.shape[0]
        tried = self._of(layer)
        if not tried:
            return self._own(rows, matrix, bias, activation)
        size = self._size(layer, tried, count)
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
        """Returns a line for the library's layers on a device together, and one for every other layer."""
        layers = [(layer, tried) for layer, tried in self._tried.items() if layer.device == device]
        others = [layer for layer, tried in layers if not tried]
        lines = [f"product {each}: by our own kernel: cuBLAS's bits depend on the rows" for each in others]
        if len(others) < len(layers):
            counts = {count for _, tried in layers for count, agrees in tried.items() if agrees}
            number = len(layers) - len(others)
            text = f"products: {number} layers by cuBLAS, with equal bits at {len(counts)} counts of rows"
            lines.insert(0, text)
        return lines

    def choices(self, device: torch.device) -> list[str]:
        """For each layer on a device whether it is the library's: the same on every rank."""
        layers = self._tried.items()
        return sorted(f"{layer}: {bool(tried)}" for layer, tried in layers if layer.device == device)

    def _of(self, layer: Layer) -> dict[int, bool]:
        with self._lock:
            if layer not in self._tried:
                if _is_capturing(layer.device):
                    raise CaptureError(f"fixed_linear: {layer} was not tried before it is captured")
                agree = self._agrees(layer, self._counts)
                self._tried[layer] = dict.fromkeys(self._counts, True) if agree else {}
            return self._tried[layer]

    def _size(self, layer: Layer, tried: dict[int, bool], count: int) -> int:
        if tried.get(count) or count == 0:
            return count
        # What is warmed up will be captured and replayed often; other counts seldom come again.
        wanted = count if is_measuring() else max(COUNTS[0], round_up(count, halfway=True))
        with self._lock:
            if wanted not in tried and not _is_capturing(layer.device):
                try:
                    tried[wanted] = self._agrees(layer, [wanted])
                except torch.OutOfMemoryError:
                    tried[wanted] = False
            verified = [size for size, agrees in tried.items() if agrees]
        if wanted in verified:
            return wanted
        return min((size for size in verified if size >= count), default=max(verified))

    def _agrees(self, layer: Layer, counts: Sequence[int]) -> bool:
        try:
            return same_bits(self._library, layer, counts, reference_rows=REFERENCE_ROWS)
        except torch.OutOfMemoryError:
            raise  # it says nothing of the layer
        except RuntimeError:  # the library does not take it unsplit
            return False


def _aligned(rows: Tensor) -> Tensor:
    """Returns the rows, contiguous and aligned as in every trial: an algorithm may be chosen by alignment."""
    if rows.is_contiguous() and rows.data_ptr() % ALIGNMENT == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# Rows of every product on a CPU, unless a row's place in a block shows in its bits.
BLOCK_ROWS = 64


def _own_kernel(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    from fxsplit_encoder.kernels.products.triton_kernels import product

    return product(rows, matrix, bias, gelu=activation == GELU_TANH)


PRODUCTS = VerifiedProducts(library_product, _own_kernel)


@functools.cache
def block_rows(layer: Layer) -> int:
    """Returns the rows of a block on a CPU: 1 where blocks of more have other bits."""
    verified = same_bits(cpu_product, layer, [BLOCK_ROWS], reference_rows=BLOCK_ROWS)
    return BLOCK_ROWS if verified else 1


def blockwise_product(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Computes a linear layer on a CPU, in blocks of the same number of rows."""
    layer = Layer.of(rows, matrix, bias, activation)
    size = block_rows(layer)
    out = rows.new_empty(rows.shape[0], layer.out_features)
    for start in range(0, rows.shape[0], size):
        part = rows[start : start + size]
        block = rows.new_zeros(size, layer.in_features)  # aligned alike, and filled up
        block[: part.shape[0]] = part
        out[start : start + size] = cpu_product(block, matrix, bias, activation)[: part.shape[0]]
    return out


def cpu_product(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """One product of BLAS, with its bias and activation."""
    product = torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)
    return activated(product, activation)


fixed_linear = define_op(
    "fixed_linear(Tensor rows, Tensor matrix, Tensor? bias, str activation) -> Tensor",
    {"CPU": blockwise_product, "CUDA": PRODUCTS},
    lambda rows, matrix, bias, activation: rows.new_empty(rows.shape[0], matrix.shape[1]),
)

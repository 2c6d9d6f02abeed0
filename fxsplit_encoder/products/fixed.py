"""`fxsplit::fixed_linear`: a linear layer whose rows get the same bits however many others are with them.

    rows (M, K) @ matrix (K, N) + bias (N,), then nothing or the tanh form of GELU  ->  (M, N)

On a CPU the rows are cut into blocks of one size, the last of which is filled up, so that BLAS sees the same
shape every time. On CUDA cuBLAS multiplies, at counts of rows at which it was seen to give the same bits
(`products.verified`), and our own kernel, of one tile (`products.fixed_triton`), where it was not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.products.layer import NOTHING, Layer, activated
from fxsplit_encoder.products.library import library_product
from fxsplit_encoder.products.verified import VerifiedProducts, same_bits

# Rows of every product on a CPU. Where a row's place in a block shows in its bits, rows go one by one.
BLOCK_ROWS = 64

_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("fixed_linear(Tensor rows, Tensor matrix, Tensor? bias, str activation) -> Tensor")


def _own_kernel(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    from fxsplit_encoder.products.fixed_triton import product

    return product(rows, matrix, bias, activation)


PRODUCTS = VerifiedProducts(library_product, _own_kernel)
"""Those on the GPUs of this process."""

_block_rows: dict[Layer, int] = {}


def blockwise_product(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """A linear layer on a CPU, in blocks of the same number of rows."""
    layer = Layer.of(rows, matrix, bias, activation)
    if layer not in _block_rows:
        verified = same_bits(cpu_product, layer, [BLOCK_ROWS], reference_rows=BLOCK_ROWS)
        _block_rows[layer] = BLOCK_ROWS if verified else 1
    size = _block_rows[layer]
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


def _fake(rows: Tensor, matrix: Tensor, bias: Tensor | None, activation: str = NOTHING) -> Tensor:
    return rows.new_empty(rows.shape[0], matrix.shape[1])


_library.impl("fixed_linear", blockwise_product, "CPU")
_library.impl("fixed_linear", PRODUCTS, "CUDA")
torch.library.register_fake("fxsplit::fixed_linear", _fake, lib=_library)

fixed_linear = torch.ops.fxsplit.fixed_linear.default

"""Whether cuBLAS may split a product along its inner dimension."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_SETTINGS = {
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
    torch.float16: "allow_fp16_reduced_precision_reduction",
}


@contextlib.contextmanager
def split_k_forbidden(dtype: torch.dtype) -> Iterator[None]:
    """Forbids cuBLASLt to split products of 16 bits along their inner dimension, if this torch can, in the
    whole process; cuBLAS's own raise RuntimeError then.
    """
    matmul, name = torch.backends.cuda.matmul, _SETTINGS.get(dtype)
    if name is None or not hasattr(matmul, f"{name}_split_k"):
        yield
        return
    before = getattr(matmul, name), getattr(matmul, f"{name}_split_k")
    setattr(matmul, name, (False, False))
    try:
        yield
    finally:
        setattr(matmul, name, before)

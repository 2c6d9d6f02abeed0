"""Inside a process that compiles variants of FlashAttention 4 into the package's cache on disk.

    python -m fxsplit_encoder.attention.kernels.ahead_process < jobs

A job is a line such as `["flash_attn_4", 72, "bfloat16"]`. The process ends with the input, or with the first
job that fails. It needs no device: the package takes its target from the environment, and fake tensors are
not computed with.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable

import torch

from fxsplit_encoder._torch.tensors import FakeTensorMode
from fxsplit_encoder.attention.kernels import KERNELS
from fxsplit_encoder.attention.kernels.flash_attn import FlashAttention4

# What a variant is compiled for depends on neither.
_TOKENS, _HEADS = 512, 16


def compile_kernel(name: str, head_dim: int, dtype: torch.dtype) -> None:
    """Has a kernel compile what it would compile when it is called."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    with FakeTensorMode():
        qkv = torch.empty(_TOKENS, 3, _HEADS, head_dim, dtype=dtype, device="cuda")
        cu_seqlens = torch.empty(2, dtype=torch.int32, device="cuda")
        query, key, value = qkv.unbind(1)
        kernel(query, key, value, cu_seqlens, _TOKENS, head_dim**-0.5)


def main(lines: Iterable[str]) -> None:
    """Does the jobs of these lines."""
    with contextlib.suppress(AttributeError):
        _ = FlashAttention4().function.__name__  # imports the package while nothing is asked yet
    for line in lines:
        name, head_dim, dtype = json.loads(line)
        compile_kernel(name, head_dim, getattr(torch, dtype))


if __name__ == "__main__":
    main(sys.stdin)

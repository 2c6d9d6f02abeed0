"""Compile variants of FlashAttention 4 and QuACK into their caches on disk, in a separate process.

    python -m fxsplit_encoder.kernels.compile_jobs_process < jobs

A job is a line such as `["flash_attn_4", 72, "bfloat16"]` or `["quack_128x192", "gelu", "bfloat16"]`; one
that fails ends the process. The target is in the environment, and tensors are fake: no device is needed.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import torch

from fxsplit_encoder._torch.tensors import FakeTensorMode
from fxsplit_encoder.kernels import attention
from fxsplit_encoder.kernels.attention.flash_attn import FlashAttention4
from fxsplit_encoder.kernels.products.measured import KERNELS, Quack

# What a variant is compiled for depends on none of them.
_TOKENS, _HEADS, _FEATURES = 512, 16, 1024

_QUACK_HOST = "quack.gemm_runtime.host"


class _Compiled(Exception):
    """The requested kernel is compiled and on disk."""


@contextlib.contextmanager
def compiling_alone() -> Iterator[None]:
    """Ends a call of QuACK once it has compiled its kernel and asks for the device, else RuntimeError."""
    host = import_module(_QUACK_HOST)

    def stop(*_: Any) -> None:
        raise _Compiled

    asked = host.get_max_active_clusters
    host.get_max_active_clusters = stop  # type: ignore[attr-defined]
    try:
        yield
    except _Compiled:
        return
    finally:
        host.get_max_active_clusters = asked  # type: ignore[attr-defined]
    raise RuntimeError("QuACK was called and did not ask for the device: nothing is known to be compiled")


def compile_attention(name: str, head_dim: int, dtype: torch.dtype) -> None:
    """Compiles a kernel of attention as its first call would."""
    kernel = next(kernel for kernel in attention.KERNELS if kernel.name == name)
    with FakeTensorMode():
        qkv = torch.empty(_TOKENS, 3, _HEADS, head_dim, dtype=dtype, device="cuda")
        cu_seqlens = torch.empty(2, dtype=torch.int32, device="cuda")
        query, key, value = qkv.unbind(1)
        kernel(query, key, value, cu_seqlens, _TOKENS, head_dim**-0.5)


def compile_product(name: str, activation: str, dtype: torch.dtype) -> None:
    """Compiles a kernel of a layer with a bias as its first call would."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    assert isinstance(kernel, Quack)
    with FakeTensorMode(), compiling_alone():
        rows, weight = (torch.empty(_TOKENS, _FEATURES, dtype=dtype, device="cuda") for _ in range(2))
        bias = torch.empty(_TOKENS, dtype=dtype, device="cuda")
        kernel(rows, weight, bias, activation)


def main(lines: Iterable[str]) -> None:
    """Does the jobs of these lines."""
    with contextlib.suppress(AttributeError):
        _ = FlashAttention4().function.__name__  # imports the package while nothing is asked yet
    for line in lines:
        name, variant, dtype = json.loads(line)
        if isinstance(variant, str):
            compile_product(name, variant, getattr(torch, dtype))
        else:
            compile_attention(name, variant, getattr(torch, dtype))


if __name__ == "__main__":
    main(sys.stdin)

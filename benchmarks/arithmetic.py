"""The arithmetic floor: the operations that a forward must do, over the rate of a large matrix product."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from timing import wall_ms
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

_GEMM_SIDE = {"cuda": 8192, "cpu": 1024}


def count_flops(forward: Callable[[], Any]) -> int:
    """Floating-point operations of the matrix products, convolutions and attention of one eager run.

    A product of (m, k) and (k, n) counts 2 m k n, attention over a segment of T rows 4 T^2 D in all heads of
    D columns together. Everything else is left out: it costs memory traffic, not arithmetic.
    """
    with FlopCounterMode(
        display=False,
        custom_mapping={
            torch.ops.fxsplit.varlen_attention: _packed_attention,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _dense_attention,
        },
    ) as counter:
        forward()
    return counter.get_total_flops()


def gemm_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """The rate of a large square matrix product of normal numbers, the median of 30."""
    side = _GEMM_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / (wall_ms(lambda: left @ right) * 1e-3)


def _packed_attention(
    query_THD: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *_: Any, **__: Any
) -> int:
    columns = query_THD.shape[-2] * query_THD.shape[-1]
    return sum(4 * (end - start) ** 2 * columns for start, end in itertools.pairwise(cu_seqlens.tolist()))


_packed_attention._get_raw = True  # type: ignore[attr-defined]  # the lengths are in a tensor's values


def _dense_attention(query_shape: Any, key_shape: Any, value_shape: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query_shape, key_shape, value_shape))

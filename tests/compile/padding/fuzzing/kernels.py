"""What runs in place of operations whose results are not determined, or that only other devices have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fxsplit_encoder.kernels.attention  # noqa: F401  (registers the ops)

aten = torch.ops.aten


def packed_attention(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, longest: int, scale: float) -> Tensor:
    """A result that depends on every row of the own segment. Rows after the last one hold garbage."""
    rows = int(segments[-1])
    result = torch.full_like(q, float("nan"))
    result.view(-1)[::3] = 1e300
    places = torch.arange(rows)
    segment = torch.bucketize(places, segments[1:].long(), right=True)
    totals = q.new_zeros(len(segments), *q.shape[1:])
    totals = totals.index_add(0, segment, (k * v)[:rows]) + totals.index_add(0, segment, v[:rows])
    result[:rows] = (q[:rows] * scale).tanh() + totals[segment]
    return result


def _dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *rest: Any, **others: Any) -> Any:
    logits = q @ k.transpose(-1, -2) / 2
    if bias is not None:
        logits = logits + bias
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def _flash(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **others: Any) -> Any:
    return _dense(q, k, v)


def _cpu_flash(q: Tensor, *rest: Any, **others: Any) -> Any:
    # The kernel divides by the number of rows.
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    return target(q, *rest, **others) if q.numel() else _dense(q, *rest[:2])


def _composite(q: Tensor, *rest: Any, **others: Any) -> Any:
    target = aten.scaled_dot_product_attention.default
    return target(q, *rest, **others) if q.numel() else _dense(q, *rest[:2])[0]


def _dense_op(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return ((q * scale) @ k.transpose(-1, -2)).softmax(-1) @ v


def _zeros(sizes: Any, *rest: Any, dtype: torch.dtype | None = None, **others: Any) -> Tensor:
    return torch.zeros(sizes, dtype=dtype)


def _new_zeros(like: Tensor, sizes: Any, *rest: Any, **others: Any) -> Tensor:
    return like.new_zeros(sizes)


KERNELS: dict[Any, Callable[..., Any]] = {
    torch.ops.fxsplit.varlen_attention.default: packed_attention,
    torch.ops.fxsplit.dense_attention.default: _dense_op,
    aten.scaled_dot_product_attention.default: _composite,
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _cpu_flash,
    aten._scaled_dot_product_efficient_attention.default: _dense,
    aten._scaled_dot_product_cudnn_attention.default: _dense,
    aten._scaled_dot_product_fused_attention_overrideable.default: _dense,
    # What fresh memory holds is not determined.
    aten.empty.memory_format: _zeros,
    aten.new_empty.default: _new_zeros,
    aten.empty_like.default: lambda like, **others: torch.zeros_like(like),
}


def run(target: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call on tensors."""
    return KERNELS.get(target, target)(*args, **kwargs)

"""The gradients of packed attention, for whoever trains through it."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def attend_backward(
    grad_THD: Tensor, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `attend` for query, key and value, a segment at a time: right, not fast.

    Reads the boundaries on the host. Rows outside every segment get zero.
    """
    grads = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (query_THD, key_THD, value_THD)]
    boundaries = cu_seqlens.tolist()
    precise = torch.promote_types(query_THD.dtype, torch.float32)
    for start, end in itertools.pairwise(boundaries):
        rows = slice(start, end)
        g, q, k, v = (x[rows].to(precise).transpose(0, 1) for x in (grad_THD, query_THD, key_THD, value_THD))
        weights = torch.softmax(q @ k.transpose(1, 2) * scale, dim=-1)
        grad_weights = g @ v.transpose(1, 2)
        grad_logits = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
        results = (grad_logits @ k, grad_logits.transpose(1, 2) @ q, weights.transpose(1, 2) @ g)
        for grad, result in zip(grads, results, strict=True):
            grad[rows] = result.transpose(0, 1)
    return grads[0], grads[1], grads[2]

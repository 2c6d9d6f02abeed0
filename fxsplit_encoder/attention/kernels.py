"""What computes packed attention: one function a device and dtype, chosen by `attend`.

Shape suffixes: T tokens (rows of the packed sequence), H heads, D head dimension, S segments.

Every kernel here writes each row that lies inside a segment and leaves the rest undefined; a caller that
reads rows past the last segment must therefore cover them by a segment or own their values (see
`capture.segments`).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

_flash_forward = torch.ops.aten._flash_attention_forward.default
# Since torch 2.13 the flash kernel can write a caller's buffer; before, its result is copied.
_flash_forward_out = (
    torch.ops.aten._flash_attention_forward_no_dropout_inplace.default
    if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace")
    else None
)

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_MAX_HEAD_DIM = 256


def supports_flash(query_THD: Tensor) -> bool:
    """Whether torch's flash attention takes this query: CUDA, 16-bit, head_dim a multiple of 8 up to 256."""
    head_dim = query_THD.shape[-1]
    return (
        query_THD.is_cuda
        and query_THD.dtype in _FLASH_DTYPES
        and head_dim % 8 == 0
        and head_dim <= _FLASH_MAX_HEAD_DIM
    )


def attend(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> Tensor:
    """Attention within each segment of a packed sequence.

    Args:
        query_THD, key_THD, value_THD: (tokens, heads, head_dim); any strides whose last is 1.
        cu_seqlens: (segments + 1,) int32 on the same device, rising from 0; segments may be empty.
        max_seqlen: an upper bound of the longest segment, in tokens.
        scale: factor of the logits.

    Returns:
        (tokens, heads, head_dim), contiguous. Rows outside every segment are undefined.
    """
    if supports_flash(query_THD):
        out_THD: Tensor = _flash_forward(
            query_THD,
            key_THD,
            value_THD,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            0.0,
            False,
            False,
            scale=scale,
        )[0]
        return out_THD
    if query_THD.is_cuda:
        return _attend_masked(query_THD, key_THD, value_THD, cu_seqlens, scale)
    return _attend_by_segment(query_THD, key_THD, value_THD, cu_seqlens, scale)


def attend_out(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    out_THD: Tensor,
) -> Tensor:
    """`attend` into `out_THD`, which has at least `tokens` rows and keeps the later ones. Returns it."""
    rows = query_THD.shape[0]
    target_THD = out_THD if out_THD.shape[0] == rows else out_THD[:rows]
    if _flash_forward_out is not None and supports_flash(query_THD):
        _flash_forward_out(
            target_THD,
            query_THD,
            key_THD,
            value_THD,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            0.0,
            False,
            False,
            scale=scale,
        )
    else:
        target_THD.copy_(attend(query_THD, key_THD, value_THD, cu_seqlens, max_seqlen, scale))
    return out_THD


def _attend_by_segment(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """One scaled_dot_product_attention a segment, for the CPU: the boundaries are read on the host."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    boundaries = cu_seqlens.tolist()
    for start, end in itertools.pairwise(boundaries):
        if end > start:
            q, k, v = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            out[start:end] = F.scaled_dot_product_attention(q, k, v, scale=scale).squeeze(0).transpose(0, 1)
    return out


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


def _attend_masked(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Dense attention under a block-diagonal mask: what CUDA runs where flash cannot, without a host read.

    Memory and work grow with tokens squared, whatever the segments.
    """
    rows = torch.arange(query.shape[0], device=query.device, dtype=cu_seqlens.dtype)
    segment_of_row = torch.searchsorted(cu_seqlens[1:], rows, right=True)
    mask = segment_of_row[:, None] == segment_of_row[None, :]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.squeeze(0).transpose(0, 1).contiguous()

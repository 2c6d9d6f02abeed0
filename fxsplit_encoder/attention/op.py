"""`fxsplit::varlen_attention`: the op at which graphs are split.

It is registered through `torch.library.Library` rather than `torch.library.custom_op`: the latter adds about 100
microseconds of Python to every call, this about 10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.attention.kernels import _attend_by_segment, attend, attend_out

if TYPE_CHECKING:
    from torch import Tensor

_SCHEMA = "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, SymInt max_seqlen, float scale"

_library = torch.library.Library("fxsplit", "DEF")
_library.define(f"varlen_attention{_SCHEMA}) -> Tensor")
_library.define(f"varlen_attention.out{_SCHEMA}, *, Tensor(a!) out) -> Tensor(a!)")
for _device in ("CPU", "CUDA"):
    _library.impl("varlen_attention", attend, _device)


def _out_impl(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, max_seqlen: int, scale: float, *, out: Tensor) -> Tensor:
    return attend_out(q, k, v, cu, max_seqlen, scale, out)


for _device in ("CPU", "CUDA"):
    _library.impl("varlen_attention.out", _out_impl, _device)


@torch.library.register_fake("fxsplit::varlen_attention", lib=_library)
def _fake(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


@torch.library.register_fake("fxsplit::varlen_attention.out", lib=_library)
def _fake_out(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, max_seqlen: int, scale: float, *, out: Tensor) -> Tensor:
    return out


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, cu_seqlens, _, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, cu_seqlens)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Recomputes attention a segment at a time and differentiates that: right, not fast; we serve, we do not train."""
    *qkv, cu_seqlens = ctx.saved_tensors
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = _attend_by_segment(*leaves, cu_seqlens, ctx.scale)
    return (*torch.autograd.grad(out, leaves, grad), None, None, None)


torch.library.register_autograd(
    "fxsplit::varlen_attention", _backward, setup_context=_setup_context, lib=_library
)

varlen_attention = torch.ops.fxsplit.varlen_attention.default
varlen_attention_out = torch.ops.fxsplit.varlen_attention.out

"""Attention, packed and dense."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import fxsplit_encoder.attention  # noqa: F401  (registers the ops)
from fxsplit_encoder.compile.padding.rules import DENSE_ATTENTIONS

from ..builder import Builder
from .registry import call_of

aten = torch.ops.aten


@call_of("varlen_attention")
def _packed(b: Builder, name: str) -> fx.Node | None:
    q = b.floats(rank=3) if b.chance(0.2) else b.token_rows([2, 3])
    k, v = q, b.call(aten.tanh.default, q) or q
    longest = b.size(q, 0) if b.chance(0.7) else b.count()
    scale: Any = 0.5 if b.chance(0.95) else b.number(operator.truediv, 1, b.count())
    segments = b.segments() if b.chance(0.95) else b.integers()
    return b.call(torch.ops.fxsplit.varlen_attention.default, q, k, v, segments, longest, scale)


@call_of(*DENSE_ATTENTIONS)
def _dense(b: Builder, name: str) -> fx.Node | None:
    q = _query(b)
    k, v = (b.call(aten.tanh.default, q) or q if b.flag() else q for _ in range(2))
    if name == "dense_attention":
        return b.call(torch.ops.fxsplit.dense_attention.default, q, k, v, 0.5)
    bias = _bias(b, q) if b.chance(0.3) else None
    target = getattr(aten, name).default
    if name == "scaled_dot_product_attention":
        arguments: tuple[Any, ...] = (bias, 0.0, bias is None and b.chance(0.3))
    elif name == "_scaled_dot_product_flash_attention_for_cpu":
        keywords = {} if bias is None else {"attn_mask": bias}
        return b.call(target, q, k, v, 0.0, False, **keywords)
    elif name == "_scaled_dot_product_flash_attention":
        arguments = (0.0, False)
    elif name == "_scaled_dot_product_cudnn_attention":
        arguments = (bias, True)
    else:
        arguments = (bias, *([True] if "efficient" in name else []))
    return b.call(target, q, k, v, *arguments)


def _query(b: Builder) -> fx.Node:
    """(batch, heads, tokens, head_dim), tokens of the graph being its batch, most often."""
    if b.chance(0.3):
        return b.floats(rank=b.choice((3, 4)))
    return b.rows([0, 2, 3, 4], 0) if b.chance(0.75) else b.rows([2, 2, 0, 4], b.choice((1, 2)))


def _bias(b: Builder, q: fx.Node) -> fx.Node:
    """What is added to the logits."""
    shape = q.meta["val"].shape
    tokens = shape[-2]
    if isinstance(tokens, int) and b.chance(0.7):
        if b.chance(0.5):
            return b.shared([1, 1, tokens, tokens])
        sizes = [b.size(q, 0), 1, tokens, tokens]
        ones = b.shared([1, 1, 1, 1])
        return b.call(aten.expand.default, ones, sizes) or ones
    return b.floats(rank=4)

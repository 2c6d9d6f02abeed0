"""Operators as the dispatcher sees them, private kernels, and the trees of values of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

__all__ = ["OpOverload", "OpOverloadPacket", "TorchDispatchMode", "TreeSpec", "tree_flatten", "tree_leaves"]
__all__ += ["tree_map_only", "tree_unflatten"]

# `scaled_dot_product_attention` takes no cumulative lengths, and chooses among kernels by itself.
flash_attention = torch.ops.aten._flash_attention_forward.default
flash_attention_into = (
    torch.ops.aten._flash_attention_forward_no_dropout_inplace.default
    if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace")
    else None
)
"""Writes to a given result. None before torch 2.13, where a result has to be copied."""
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default

DENSE_ATTENTION_KERNELS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)
"""What AOT replaces `aten::scaled_dot_product_attention` by, as suits device and dtype."""

addmm_activation = torch.ops.aten._addmm_activation
"""A product with its bias and GELU in one kernel of cuBLAS, which no public function asks for."""

check: Callable[..., None] = torch._check
"""Tells a trace that a condition on sizes holds; outside of traces an assertion."""

_LIBRARY: Any = torch.library.Library("fxsplit", "FRAGMENT")


def define_op(
    schema: str,
    kernels: dict[str, Callable[..., Any]],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Any:
    """Registers an operator of `fxsplit` by kernels for dispatch keys and its traced form; returns its only
    overload. `torch.library.custom_op` adds several times as much Python to every call.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    for key, kernel in kernels.items():
        _LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"fxsplit::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        options: Any = {"setup_context": setup_context, "lib": _LIBRARY}
        torch.library.register_autograd(f"fxsplit::{name}", backward, **options)
    return getattr(torch.ops.fxsplit, name).default


def schema_of(target: Any) -> Any:
    """An operator's schema, with defaults and aliases, which signatures lack; None for anything else."""
    return getattr(target, "_schema", None)


def has_tag(target: Any, tag: torch.Tag) -> bool:
    """Whether a target is an operator with this tag."""
    return isinstance(target, OpOverload) and tag in target.tags


class RandomDraws(TorchDispatchMode):
    """Notes the names of operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attention without dropout draws nothing, and has the tag.
        if has_tag(function, torch.Tag.nondeterministic_seeded) and "attention" not in str(function):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class OnMeta(TorchDispatchMode):
    """Takes all tensors of a call as without data if one is."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        if any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves(given)):
            given = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), given)
        return function(*given[0], **given[1])


def register_tuple(kind: type) -> None:
    """Registers a class of tuples as tuples for walks over trees of values."""
    register_pytree_node(kind, lambda values: (list(values), None), lambda values, context: tuple(values))

"""Functions of single entries on a CPU, by the same code for every entry: for `invariant`.

torch computes `exp`, `gelu` and their like by vectors of entries, and what is left at the end of a tensor one
by one, by other code, which rounds otherwise. Which entries are left depends on how many there are. So a
tensor is filled up to whole vectors first. Arithmetic is exact in both and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, fx

from fxsplit_encoder.compile.padding.states import is_pointwise, operation

_ARITHMETIC = frozenset(
    """add sub rsub mul div neg abs sign square sqrt reciprocal floor ceil round trunc remainder fmod
    floor_divide maximum minimum clamp clamp_min clamp_max relu where masked_fill fill copy clone _to_copy
    zeros_like ones_like eq ne lt le gt ge isnan isinf logical_and logical_or logical_not logical_xor
    bitwise_and bitwise_or bitwise_not bitwise_xor""".split()
)

# Entries that are computed at once, at most: two vectors of 64 bytes, of the narrowest floats.
_ENTRIES = 64


def in_whole_vectors(module: fx.GraphModule) -> None:
    """Makes the functions of a graph whose entries depend on their place compute whole vectors."""
    for node in module.graph.nodes:
        if node.op == "call_function" and is_pointwise(node) and operation(node) not in _ARITHMETIC:
            node.target = _filling_up(node.target)
    module.recompile()


def _filling_up(function: Any) -> Callable[..., Tensor]:
    def in_whole_vectors(*args: Any, **kwargs: Any) -> Tensor:
        return filled_up(function, *args, **kwargs)

    return in_whole_vectors


def filled_up(function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A function of single entries, of tensors that are filled up to whole vectors."""
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    shape = torch.Size(numpy.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors)))
    if not shape:
        result: Tensor = function(*args, **kwargs)
        return result
    count = shape.numel()

    def filled(argument: Any) -> Any:
        if not isinstance(argument, Tensor) or argument.dim() == 0:
            return argument
        whole = argument.new_ones(-(-count // _ENTRIES) * _ENTRIES)
        whole[:count] = argument.expand(shape).reshape(-1)
        return whole

    made = function(*map(filled, args), **{name: filled(value) for name, value in kwargs.items()})
    return _laid_out_as_traced(made[:count].view(shape), tensors)


def _laid_out_as_traced(result: Tensor, tensors: list[Tensor]) -> Tensor:
    """The result with the strides that the function gives: those of a single argument, as far as these are
    dense.
    """
    like = next((t for t in tensors if t.shape == result.shape), None)
    if like is None or like.is_contiguous():
        return result.contiguous()
    return torch.empty_like(like, dtype=result.dtype).copy_(result)

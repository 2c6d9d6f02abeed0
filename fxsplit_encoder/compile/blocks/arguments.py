"""The arguments of a block as those of an op: tensors, numbers, and a string that says how they lie."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.errors import CompileError

Number = int | torch.SymInt


def take_apart(value: Any, tensors: list[Tensor], numbers: list[int]) -> str:
    """A value as a Python literal in which ("tensor", 0) and ("number", 0) stand for what is appended to the
    lists. Dynamo traces this. Types are exact: a named tuple, say, would be put together as another type.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return f"('tensor', {len(tensors) - 1})"
    if value is None or kind in (bool, float, str):
        return f"('constant', {value!r})"
    if kind is int:
        numbers.append(value)
        return f"('number', {len(numbers) - 1})"
    if kind in (tuple, list):
        parts = ""
        for part in value:  # Dynamo takes longer for a comprehension
            parts += take_apart(part, tensors, numbers) + ", "
        return f"('{'list' if kind is list else 'tuple'}', [{parts}])"
    if kind is dict:
        parts = ""
        for key, part in value.items():
            parts += f"{key!r}: {take_apart(part, tensors, numbers)}, "
        return f"('dict', {{{parts}}})"
    raise CompileError(f"a block takes a {kind.__name__}, which no op can")


def put_together(structure: str, tensors: Sequence[Tensor], numbers: Sequence[Number]) -> Any:
    """The value that `take_apart` took apart, of these tensors and numbers."""
    return _value(ast.literal_eval(structure), tensors, numbers)


def _value(literal: Any, tensors: Sequence[Tensor], numbers: Sequence[Number]) -> Any:
    kind, content = literal
    if kind == "constant":
        return content
    if kind in ("tensor", "number"):
        return (tensors if kind == "tensor" else numbers)[content]
    if kind == "dict":
        return {key: _value(v, tensors, numbers) for key, v in content.items()}
    values = [_value(v, tensors, numbers) for v in content]
    return values if kind == "list" else tuple(values)

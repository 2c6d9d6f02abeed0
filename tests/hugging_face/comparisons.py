"""Outputs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-5


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, by where they are in it."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors(part, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from tensors(part, f"{name}[{number}]")


def assert_close(got: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """The same fields in the same order, of the same shapes and dtypes, with almost the same values."""
    assert isinstance(got, type(expected))
    found, wanted = dict(tensors(got)), dict(tensors(expected))
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_same_bits(got: Any, expected: Any) -> None:
    """The same values, bit for bit."""
    assert_close(got, expected, tolerance=0)


def generated(model: Any, inputs: Mapping[str, Any], **options: Any) -> Tensor:
    """The tokens that a model generates greedily."""
    tokens: Tensor = model.generate(**inputs, max_new_tokens=4, do_sample=False, **options)
    return tokens

"""What a path's forward is traced with: inputs of a moderate size, and which of their sizes vary."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fxsplit_encoder.manager.row_groups import RowGroups

# The trace runs the forward once, so it is made at a moderate size; the size is also Inductor's hint for its
# kernels.
_TRACED_TOKENS = 256


class SizedInputs(Protocol):
    """Inputs of a forward at any of its budgets."""

    @property
    def budgets(self) -> Sequence[int]:
        """In output tokens, increasing."""

    def first_values(self, budgets: Sequence[int]) -> dict[str, Tensor]:
        """Inputs of the first of these budgets that has some."""

    def growing_inputs(self) -> frozenset[str]:
        """The inputs that have more rows at larger budgets."""


@dataclass(frozen=True)
class TracedExample:
    """What a forward is traced with."""

    inputs: dict[str, Tensor]
    dynamic_dims: dict[str, list[int]]
    """Of each input the dimensions whose sizes vary."""

    @classmethod
    def of(cls, sized: SizedInputs) -> TracedExample:
        """That of a forward.

        Raises:
            InputError: the tower makes no inputs.
        """
        inputs = _moderate_inputs(sized)
        return cls(inputs, _dynamic_dims(sized, inputs))


def _moderate_inputs(sized: SizedInputs) -> dict[str, Tensor]:
    """Inputs of a moderate size, with two tiles rather than one: a trace makes a size of 1 a constant."""
    nearest = sorted(sized.budgets, key=lambda budget: abs(budget - _TRACED_TOKENS))
    inputs = sized.first_values(nearest)
    growing = sized.growing_inputs() if len(sized.budgets) > 1 else inputs.keys()
    if any(inputs[name].shape[:1] == (1,) for name in inputs.keys() & growing):
        return sized.first_values([2 * budget for budget in nearest])
    return inputs


def _dynamic_dims(sized: SizedInputs, inputs: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The dimensions that differ between two budgets; with one budget, the first of every tensor."""
    budgets = sized.budgets
    if len(budgets) < 2:
        return {name: [0] for name, tensor in inputs.items() if tensor.dim() > 0 and tensor.shape[0] > 1}
    small, large = sized.first_values(budgets), sized.first_values(budgets[::-1])
    return {
        name: [dim for dim, size in enumerate(tensor.shape) if size != large[name].shape[dim]]
        for name, tensor in small.items()
    }


def row_groups_of(sized: SizedInputs, without: Collection[str]) -> RowGroups:
    """What inputs have a row for a group of patches, as far as the budgets tell.

    Args:
        without: inputs that may have more rows than a batch needs.
    """
    budgets = sized.budgets
    sizes = {0, len(budgets) // 2, len(budgets) - 1}
    if len(sizes) < 2:
        return RowGroups()
    samples = [sized.first_values(budgets[size:]) for size in sorted(sizes)]
    return RowGroups.of([{n: v for n, v in each.items() if n not in without} for each in samples])


def with_contents(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs that tell something: random values for zeros, which are the same wherever they come from."""
    return {name: _with_contents(tensor) for name, tensor in values.items()}


def _with_contents(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or bool(tensor.any()):
        return tensor
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu").to(tensor)

"""Inputs of a forward with one row for several patches: found, repeated for a program, and undone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from fxsplit_encoder._torch.dispatch import check
from fxsplit_encoder.capture.buffers import StaticValue
from fxsplit_encoder.errors import InputError

_Value = TypeVar("_Value", bound="StaticValue | None")


class RowGroups:
    """The inputs with one row for several patches, such as a row a token.

    Traced as they are, the graph would have two counts of tokens. So such an input enters the graph with its
    rows repeated for each patch, and the forward takes one of them. `factors` are patches per row, by the
    names of these inputs; `patches` are the inputs with a row a patch.
    """

    def __init__(self, factors: Mapping[str, int] | None = None, patches: Sequence[str] = ()) -> None:
        self.factors = dict(factors or {})
        self.patches = tuple(patches)

    @classmethod
    def of(cls, samples: Sequence[Mapping[str, Tensor]]) -> RowGroups:
        """Finds the factors that hold in all samples of a forward's inputs, of different sizes."""
        rows = {
            name: [sample[name].shape[0] for sample in samples]
            for name, tensor in samples[0].items()
            if tensor.dim() > 0
        }
        growing = {name: counts for name, counts in rows.items() if len(set(counts)) > 1}
        if not growing:
            return cls()
        most = max(growing.values(), key=lambda counts: counts[0])
        factors = {
            name: most[0] // counts[0]
            for name, counts in growing.items()
            if 0 < counts[0] < most[0] and most == [most[0] // counts[0] * count for count in counts]
        }
        return cls(factors, [name for name, counts in growing.items() if counts == most])

    def spread(self, values: Mapping[str, _Value]) -> dict[str, _Value]:
        """Repeats rows for each patch; InputError: an input has another number of rows for these patches."""
        if not self.factors:
            return dict(values)
        self._check(values)
        return {name: self._spread(name, value) for name, value in values.items()}

    def gather(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undoes `spread`."""
        if not self.factors:
            return dict(inputs)
        gathered = dict(inputs)
        rows = inputs[self.patches[0]].shape[0]
        for name in (*self.factors, *self.patches):
            check(inputs[name].shape[0] == rows)
        for name, factor in self.factors.items():
            gathered[name] = inputs[name].unflatten(0, (-1, factor))[:, 0]
        return gathered

    def _check(self, values: Mapping[str, StaticValue | None]) -> None:
        # What the samples had in proportion may be so by chance.
        given = [value for name in self.patches if (value := values.get(name)) is not None]
        for name, factor in self.factors.items():
            value = values.get(name)
            if value is not None and given and factor * _num_rows(value) != _num_rows(given[0]):
                raise InputError(
                    f"{name}: expected a row for every {factor} of {_num_rows(given[0])} patches, as in the "
                    f"inputs that the tower makes for captures; got {_num_rows(value)}"
                )

    def _spread(self, name: str, value: Any) -> Any:
        factor = self.factors.get(name)
        if factor is None or value is None:
            return value
        if isinstance(value, Tensor):
            return value.repeat_interleave(factor, dim=0)
        return [part.repeat_interleave(factor, dim=0) for part in value]


def _num_rows(value: StaticValue) -> int:
    return value.shape[0] if isinstance(value, Tensor) else sum(part.shape[0] for part in value)


def row_groups_of(
    first_values: Callable[[Sequence[int]], Mapping[str, Tensor]],
    budgets: Sequence[int],
    without: Collection[str],
) -> RowGroups:
    """Finds the inputs with a row for a group of patches, but for those `without`, from inputs of three
    budgets: `first_values` makes them of the first budget for which it can.
    """
    sizes = {0, len(budgets) // 2, len(budgets) - 1}
    if len(sizes) < 2:
        return RowGroups()
    samples = [first_values(budgets[size:]) for size in sorted(sizes)]
    return RowGroups.of([{n: v for n, v in each.items() if n not in without} for each in samples])

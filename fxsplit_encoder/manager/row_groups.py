"""Inputs with a row for a group of patches, which a trace cannot tell from sizes that vary by themselves.

Four patches make an output token, say, and a tower of vLLM's has an order of tokens among its inputs: a
quarter of the rows of the patches. Traced as it is, nothing says so, and the graph has two counts of tokens.
So such an input enters the graph with every row repeated for each patch of its group, and the forward takes
one of them: its size is then the quarter of the patches that it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from fxsplit_encoder._torch.dispatch import check
from fxsplit_encoder.capture.buffers import StaticValue
from fxsplit_encoder.errors import InputError

_Value = TypeVar("_Value", bound="StaticValue | None")


class RowGroups:
    """Which inputs have a row for how many patches.

    Args:
        factors: the patches of a row, for inputs for which these are more than one.
        patches: the inputs with a row a patch.
    """

    def __init__(self, factors: Mapping[str, int] | None = None, patches: Sequence[str] = ()) -> None:
        self.factors = dict(factors or {})
        self.patches = tuple(patches)

    @classmethod
    def of(cls, samples: Sequence[Mapping[str, Tensor]]) -> RowGroups:
        """What holds in every sample of inputs of one forward, each of another size."""
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
        """The values of a batch with a row for each patch.

        Raises:
            InputError: an input has another number of rows for these patches than the samples had.
        """
        if not self.factors:
            return dict(values)
        self._check(values)
        return {name: self._spread(name, value) for name, value in values.items()}

    def gather(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs as the forward has them, of what `spread` gives."""
        if not self.factors:
            return dict(inputs)
        gathered = dict(inputs)
        rows = inputs[self.patches[0]].shape[0]
        for name in (*self.factors, *self.patches):
            check(inputs[name].shape[0] == rows)  # type: ignore[no-untyped-call]
        for name, factor in self.factors.items():
            gathered[name] = inputs[name].unflatten(0, (-1, factor))[:, 0]  # type: ignore[no-untyped-call]
        return gathered

    def _check(self, values: Mapping[str, StaticValue | None]) -> None:
        """That the factors hold here too: what the samples had in proportion may be so by chance."""
        given = [value for name in self.patches if (value := values.get(name)) is not None]
        for name, factor in self.factors.items():
            value = values.get(name)
            if value is not None and given and factor * _rows(value) != _rows(given[0]):
                raise InputError(
                    f"{name}: expected a row for every {factor} of {_rows(given[0])} patches, as in the "
                    f"inputs that the tower makes for captures; got {_rows(value)}"
                )

    def _spread(self, name: str, value: _Value) -> _Value:
        factor = self.factors.get(name)
        if factor is None or value is None:
            return value
        if isinstance(value, Tensor):
            return value.repeat_interleave(factor, dim=0)  # type: ignore[return-value]
        return [part.repeat_interleave(factor, dim=0) for part in value]  # type: ignore[return-value]


def _rows(value: StaticValue) -> int:
    return value.shape[0] if isinstance(value, Tensor) else sum(part.shape[0] for part in value)

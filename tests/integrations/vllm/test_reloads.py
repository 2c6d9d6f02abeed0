"""Weights that vLLM loads into a model that runs are told to what keeps them in another form."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.integrations.vllm.adapter import note_reloads


class Model(nn.Module):
    """Loads weights as vLLM's models do: through `parameter.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            own[name].data.copy_(weight)
            loaded.add(name)
        return loaded


def in_place(model: Model, weight: Tensor) -> None:
    assert model.load_weights([("linear.weight", weight)]) == {"linear.weight"}


def interrupted(model: Model, weight: Tensor) -> None:
    with pytest.raises(KeyError):
        model.load_weights([("linear.weight", weight), ("nothing", weight)])


@pytest.mark.parametrize("reload", [in_place, interrupted])
def test_a_reload_is_told_at_its_end(reload: Callable[[Model, Tensor], None]) -> None:
    """Also of one that failed. What is derived of weights is then computed by the next run."""
    model = Model()
    told: list[float] = []
    note_reloads(model, lambda: told.append(float(model.linear.weight.sum())))
    for value in (3.0, 5.0):
        reload(model, torch.full((2, 2), value))
    assert told == [12.0, 20.0]


def test_noting_it_twice_changes_what_is_called_alone() -> None:
    model, told = Model(), []
    note_reloads(model, lambda: told.append("first"))
    once = model.load_weights
    note_reloads(model, lambda: told.append("second"))
    assert model.load_weights is once
    in_place(model, torch.ones(2, 2))
    assert told == ["second"]
    assert once.__doc__ == Model.load_weights.__doc__
    assert once.__wrapped__.__func__ is Model.load_weights  # type: ignore[attr-defined]

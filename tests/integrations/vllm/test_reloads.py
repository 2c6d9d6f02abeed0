"""Weights that vLLM loads into a model that runs reach what keeps them in another form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder.compile.derived import DerivedParameter, DerivedParameters
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


def ignore() -> None: ...


def in_place(model: Model, weight: Tensor) -> None:
    assert model.load_weights([("linear.weight", weight)]) == {"linear.weight"}


def by_layers(model: Model, weight: Tensor) -> None:
    """As vLLM's `reload_weights`: what is loaded goes to other parameters first, whose values are copied into
    the old ones when everything is there.
    """
    old = model.linear.weight
    model.linear.weight = nn.Parameter(torch.empty(2, 2))
    in_place(model, weight)
    old.data.copy_(model.linear.weight)
    model.linear.weight = old


def interrupted(model: Model, weight: Tensor) -> None:
    with pytest.raises(KeyError):
        model.load_weights([("linear.weight", weight), ("nothing", weight)])


@pytest.mark.parametrize("reload", [in_place, by_layers, interrupted])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_derived_parameters_follow(reload: Callable[[Model, Tensor], None], mode: Any) -> None:
    model = Model()
    derived = DerivedParameters([DerivedParameter(1, (0,), lambda weight: 2 * weight)])
    slots: list[Any] = [model.linear.weight, None]
    derived.fill(slots)
    told: list[None] = []

    def outdate() -> None:
        told.append(None)
        derived.outdate()

    note_reloads(model, outdate)
    for value in (3.0, 5.0):
        with mode():
            reload(model, torch.full((2, 2), value))
        assert told
        told.clear()
        derived.follow_writes()
        assert torch.equal(slots[1], torch.full((2, 2), 2 * value))


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


def test_a_model_that_loads_nothing_is_left_alone() -> None:
    other = nn.Linear(2, 2)
    note_reloads(other, ignore)
    assert not hasattr(other, "load_weights")

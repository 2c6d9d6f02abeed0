"""A tower for another process: its structure as it is, zeros for its weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager.compile_process import dump_tower, load_tower
from fxsplit_encoder.manager.start import _structure
from tests.towers.tiny_towers import TINY


@pytest.mark.parametrize("name", TINY)
def test_every_tower_can_be_sent(name: str) -> None:
    tower = fx.wrap(TINY[name].make())
    made = load_tower(dump_tower(tower))
    assert type(made) is type(tower) and _structure(made) == _structure(tower)
    weights = {name: tensor for name, tensor in made.named_parameters() if tensor.nbytes > 4096}
    assert not any(tensor.any() for tensor in weights.values())


def test_what_tensors_look_like_stays_and_small_values_too() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(64, 64).t(), requires_grad=False)
    module.tied = module.weight
    module.register_buffer("table", torch.arange(6).view(2, 3))
    made = load_tower(dump_tower(module))
    assert made.weight is made.tied and isinstance(made.weight, nn.Parameter)
    assert made.weight.stride() == (1, 64) and not made.weight.requires_grad and not made.weight.any()
    torch.testing.assert_close(made.table, module.table)


class Subclass(torch.Tensor):
    pass


def test_what_cannot_be_sent_is_said() -> None:
    for value, why in (
        (torch.ones(2).as_subclass(Subclass), "it holds a Subclass"),
        (torch.ones(2, 2).to_sparse(), "it holds a tensor of layout torch.sparse_coo"),
        (lambda: None, "it cannot be pickled"),
    ):
        with pytest.raises(InputError, match=why):
            dump_tower([value])
    own = type("Own", (), {"__module__": "__main__"})
    with pytest.raises(InputError, match="Own is defined in the script that was started"):
        dump_tower(own)

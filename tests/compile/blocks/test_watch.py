"""Blocks that are no longer what they were are noticed, whichever way they were changed."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxsplit_encoder._torch.modules import Held
from fxsplit_encoder.compile.blocks.watch import BlockWatch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Dropout())


class Scaled(nn.Linear):
    pass


class Config:
    def __init__(self) -> None:
        self.eps = 1e-6


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.merger = nn.Linear(4, 4)
        self.config = Config()


@pytest.fixture
def tower() -> Tower:
    return Tower().eval()


def watch(tower: Tower) -> BlockWatch:
    return BlockWatch({block: tower for block in tower.blocks})


def replace_block(tower: Any) -> None:
    tower.blocks[1] = copy.deepcopy(tower.blocks[1])


def replace_list(tower: Any) -> None:
    tower.blocks = copy.deepcopy(tower.blocks)


def replace_layer(tower: Any) -> None:
    tower.blocks[1].mlp[0] = nn.Linear(4, 4).eval()


def replace_past_setattr(tower: Any) -> None:
    tower.blocks[2].mlp._modules["1"] = nn.Identity().eval()


def add_layer(tower: Any) -> None:
    tower.blocks[2].mlp.append(nn.Identity().eval())


def remove_layer(tower: Any) -> None:
    del tower.blocks[2].mlp[1]


def add_hook(tower: Any) -> None:
    tower.blocks[0].mlp[0].register_forward_hook(lambda *args: None)


def add_pre_hook(tower: Any) -> None:
    tower.blocks[0].register_forward_pre_hook(lambda *args: None)


def give_forward(tower: Any) -> None:
    tower.blocks[1].norm.forward = lambda x: x


def train_dropout(tower: Any) -> None:
    tower.blocks[2].mlp[1].train()


def change_class(tower: Any) -> None:
    tower.blocks[1].mlp[0].__class__ = Scaled


def parametrize(tower: Any) -> None:
    nn.utils.parametrizations.weight_norm(tower.blocks[1].mlp[0])


def configure(tower: Any) -> None:
    tower.config.eps = 1e-5


def replace_configuration(tower: Any) -> None:
    tower.config = copy.copy(tower.config)


CHANGES: list[Callable[[Any], None]] = [
    *(replace_block, replace_list, replace_layer, replace_past_setattr, add_layer, remove_layer),
    *(add_hook, add_pre_hook, give_forward, train_dropout, change_class, parametrize, configure),
    replace_configuration,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed(tower: Tower, change: Callable[[Any], None]) -> None:
    watched = watch(tower)
    assert watched.are_unchanged()
    change(tower)
    assert not watched.are_unchanged()
    assert watch(tower).are_unchanged()


def test_what_is_no_change_of_blocks(tower: Tower) -> None:
    watched = watch(tower)
    tower.load_state_dict(copy.deepcopy(tower.state_dict()))
    tower.merger.register_forward_hook(lambda *args: None)
    tower.merger.train()
    tower.blocks[0].norm.train()  # which computes the same then
    tower.half()
    for parameter in tower.parameters():
        parameter.data = parameter.data.clone()
    tower.blocks[0].norm.weight = nn.Parameter(torch.ones(4))
    assert watched.are_unchanged()


def test_hooks_forwards_and_modes_that_were_there_before(tower: Any) -> None:
    hook = tower.blocks[0].register_forward_hook(lambda *args: None)
    block = tower.blocks[1]
    block.forward = types.MethodType(Block.__call__, block)
    tower.blocks[2].mlp[1].train()
    watched = watch(tower)
    block.forward = types.MethodType(Block.__call__, block)  # another object that is the same method
    assert watched.are_unchanged()
    tower.blocks[2].mlp[1].eval()
    assert not watched.are_unchanged()
    tower.blocks[2].mlp[1].train()
    assert watched.are_unchanged()
    block.forward = types.MethodType(Block.__repr__, block)
    assert not watched.are_unchanged()
    del block.forward
    block.other = None  # as many attributes as before
    assert not watched.are_unchanged()
    block.forward = types.MethodType(Block.__call__, block)
    del block.other
    assert watched.are_unchanged()
    hook.remove()
    assert not watched.are_unchanged()
    tower.blocks[0].register_forward_hook(lambda *args: None)
    assert not watched.are_unchanged()


def test_held_compares_by_identity_and_order() -> None:
    class Incomparable:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared by value")

        __hash__ = None  # type: ignore[assignment]

    first: dict[str, Any] = {"a": Incomparable(), "b": None}
    last: dict[str, Any] = {"c": Incomparable()}
    held = Held([first, last])
    assert held.is_same()
    last["d"] = 1
    assert not held.is_same()
    del last["d"]
    assert held.is_same()
    value = last.pop("c")
    assert not held.is_same()
    last["c"] = value
    first["a"] = Incomparable()
    assert not held.is_same()

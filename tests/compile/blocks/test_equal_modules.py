from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.utils.output_capturing import install_output_capuring_hook

from fxsplit_encoder.compile.blocks import equal_modules


class Settings:
    pass


class Block(nn.Module):
    def __init__(self, settings: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("table", torch.zeros(3))
        self.activation = functools.partial(torch.nn.functional.gelu, approximate="tanh")
        self.sizes = {"heads": 2, "windows": [4, (1, None)]}
        self.settings = settings


def model(*blocks: nn.Module) -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks)})


def test_blocks_that_differ_in_their_weights_are_equal() -> None:
    shared = Settings()
    blocks = [Block(shared) for _ in range(3)]
    assert equal_modules(model(*blocks)) == [blocks]


def test_a_block_that_occurs_twice_is_one_block() -> None:
    block, other = Block(), Block()
    assert equal_modules(model(block, block)) == []
    assert equal_modules(model(block, other, block)) == [[block, other]]


def test_lists_inside_equal_modules_are_left_to_them() -> None:
    outer = [model(Block(), Block()) for _ in range(2)]
    assert equal_modules(model(*outer)) == [outer]
    alone = model(Block(), Block())
    assert equal_modules(model(alone)) == [list(alone["blocks"])]  # type: ignore[index]


def _set(name: str, value: Any) -> Callable[[Block], None]:
    return lambda block: setattr(block, name, value)


def _subclass(block: Block) -> None:
    class Quantised(nn.Parameter):
        pass

    block.linear.weight = Quantised(block.linear.weight.data)


def _weight_after_bias(block: Block) -> None:
    weight = block.linear.weight
    del block.linear.weight
    block.linear.weight = weight


CHANGES: list[tuple[str, Callable[[Block], object]]] = [
    ("an inner hook", lambda block: block.linear.register_forward_hook(lambda *given: None)),
    ("a dtype", lambda block: block.linear.to(torch.bfloat16)),
    ("strides", lambda block: setattr(block.linear.weight, "data", block.linear.weight.data.t())),
    ("a forward of its own", _set("forward", lambda x: x)),
    ("a partial", _set("activation", functools.partial(torch.nn.functional.gelu, approximate="none"))),
    ("a subclass of tensor", _subclass),
    ("an attribute", _set("layer", 3)),
    ("an object", _set("settings", Settings())),
    ("a number for a boolean", _set("settings", 0)),
    ("a nested value", _set("sizes", {"heads": 2, "windows": [4, (2, None)]})),
    ("training", lambda block: block.norm.train(False)),
    ("a submodule", lambda block: block.add_module("extra", nn.Identity())),
    ("a trainable weight", lambda block: block.linear.requires_grad_(False)),
    ("the order of weights", _weight_after_bias),
    ("a loose tensor", _set("settings", torch.zeros(2))),
]


@pytest.mark.parametrize("change", [c for _, c in CHANGES], ids=[name for name, _ in CHANGES])
def test_a_block_that_differs_is_not_equal(change: Callable[[Block], object]) -> None:
    blocks = [Block() for _ in range(3)]
    change(blocks[1])
    assert equal_modules(model(*blocks)) == [[blocks[0], blocks[2]]]


def test_tied_weights_are_told_from_others() -> None:
    blocks = [nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(4)]
    for block in blocks[:2]:
        block[1].weight = block[0].weight
    assert equal_modules(model(*blocks)) == [blocks[:2], blocks[2:]]


def test_blocks_that_share_a_replaced_forward_are_left_alone() -> None:
    blocks = [Block() for _ in range(2)]
    for block in blocks:
        block.forward = torch.nn.functional.gelu  # type: ignore[method-assign]
    assert equal_modules(model(*blocks)) == []


def test_a_hook_of_the_block_itself_runs_where_it_is_called() -> None:
    blocks = [Block(), Block()]
    blocks[0].register_forward_hook(lambda module, args, output: None)
    assert equal_modules(model(*blocks)) == [blocks]


@pytest.mark.parametrize(("key", "groups"), [("attentions", 1), ("hidden_states", 0)])
def test_the_hooks_by_which_transformers_collects_attention_do_nothing_here(key: str, groups: int) -> None:
    blocks = [Block(), Block()]
    for block in blocks:
        install_output_capuring_hook(block.linear, key, 0)
    assert len(equal_modules(model(*blocks))) == groups

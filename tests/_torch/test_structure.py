"""A tower's modules are compared with those that there were: every change is seen, and nothing else."""

from __future__ import annotations

import copy
import types
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxsplit_encoder._torch.structure import CALLED_AT_REQUESTS, FORWARD_OF_CAPTURES, Structure
from fxsplit_encoder.protocol import SupportsEncoderCudaGraph


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Sequential(nn.GELU(), nn.Linear(2, 2))


class Config:
    def __init__(self) -> None:
        self.scales = {"first": 1.0}


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.dropout = nn.LayerNorm(2), nn.Dropout()
        self.config, self.levels, self.calls, self.unread = Config(), [1, 2], 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block.first(x) * self.levels[0] * self.config.scales["first"]  # type: ignore[operator]
        return self.dropout(self.norm(x))  # type: ignore[no-any-return]


class Counting(nn.Module):
    """A tower that keeps counts of its own, by each way that code adds to what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[Any] = Counter()
        self.lists: defaultdict[str, list[int]] = defaultdict(list)
        self.seen: list[int] = []
        self.sizes: set[int] = set()
        self.last: dict[str, int] = {}
        self.calls, self.requests, self.given, self.merged = 0, 0, None, [1]

    def encoder_cudagraph_forward(self, inputs: Any, path: str = "default") -> Any:
        self.runs[path, len(inputs)] += 1
        self.lists[path].append(len(inputs))
        sizes = self.sizes
        sizes.add(len(inputs))
        self.last.update({path: self.note(inputs)})
        return inputs, (self.seen, self.requests, self.lists, self.last), self.merged and self.unmerge()

    def note(self, inputs: Any) -> int:
        self.calls += 1
        self.seen.append(self.calls)
        return len(self.seen)

    def unmerge(self) -> None:
        while self.merged:
            self.merged.pop()

    def prepare_encoder_cudagraph_replay_buffers(self, *args: Any) -> Any:
        self.requests += 1
        return self.given


class Twice(nn.Linear):
    pass


def twice(*args: Any) -> None: ...


def collect(*args: Any) -> None: ...


collect.__module__ = "transformers.utils.output_capturing"


def swap(tower: Any) -> None:
    blocks = tower.blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a layer": (
        lambda t: setattr(t.blocks[0], "first", copy.deepcopy(t.blocks[0].first)),
        "blocks.0.first: a Linear, and now another Linear",
    ),
    "one more": (lambda t: t.blocks.append(Block()), "blocks.2: a NoneType, and now another Block"),
    "the order": (swap, "blocks.0: a Block, and now another Block"),
    "a class": (
        lambda t: setattr(t.blocks[1].first, "__class__", Twice),
        "blocks.1.first: a Linear, and now another Twice",
    ),
    "a hook": (lambda t: t.blocks[0].register_forward_hook(twice), "blocks.0: another hook than before"),
    "a number": (lambda t: setattr(t.norm, "eps", 0.5), "norm: eps 0.5, which was 1e-05"),
    "a number in a list": (lambda t: t.levels.append(3), "the tower: levels [1, 2, 3], which was [1, 2]"),
    "a number of the configuration": (
        lambda t: t.config.scales.update(first=2.0),
        "config: scales {'first': 2.0}, which was {'first': 1.0}",
    ),
    "a forward": (
        lambda t: setattr(t.blocks[0].first, "forward", twice),
        "blocks.0.first: another forward than before",
    ),
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES.keys())
def test_every_change_is_seen_and_said(change: Callable[[Any], object], said: str) -> None:
    tower = Tower()
    structure = Structure(tower)
    assert structure.is_unchanged() and not structure.change()
    change(tower)
    for _ in range(2):
        assert not structure.is_unchanged()
        assert structure.change() == said
    again = Structure(tower)
    assert again.is_unchanged() and not again.change()


def test_what_was_there_may_not_go_or_be_replaced() -> None:
    tower = Tower()
    hook = tower.blocks[0].register_forward_hook(twice)
    tower.blocks[1].forward = twice  # type: ignore[assignment]
    structure = Structure(tower)
    assert set(structure.additions) == {("blocks.0", "hook"), ("blocks.1", "forward")}
    assert structure.is_unchanged()
    hook.remove()
    assert structure.change() == "blocks.0: another hook than before"
    tower.blocks[0].register_forward_hook(lambda *args: None)
    assert structure.change() == "blocks.0: another hook than before"
    structure = Structure(tower)
    tower.blocks[1].forward = collect  # type: ignore[assignment]
    assert structure.change() == "blocks.1: another forward than before"


def test_weights_modes_and_other_attributes_change_nothing() -> None:
    tower = Tower()
    structure = Structure(tower)
    tower.train().eval()
    tower.blocks[0].first.weight = nn.Parameter(torch.ones(2, 2))
    tower.blocks[0].cache = {}  # type: ignore[assignment]
    tower.half().float()
    tower(torch.ones(2, 2))
    tower.unread += 1
    tower.blocks[0].first.in_features = 3  # type: ignore[union-attr, assignment]
    tower.config = copy.deepcopy(tower.config)
    assert structure.is_unchanged()
    tower.config.scales["first"] = 2.0
    assert not structure.is_unchanged()


def test_what_a_tower_writes_itself_and_methods_of_requests_change_nothing() -> None:
    tower: Any = Counting()
    structure = Structure(tower)
    tower.merged.clear()
    assert structure.change() == "the tower: merged [], which was [1]"
    structure = Structure(tower)
    for size in (1, 2):
        tower.encoder_cudagraph_forward([0] * size, path=str(size))
        tower.prepare_encoder_cudagraph_replay_buffers()
        assert structure.is_unchanged() and not structure.change()
    tower.given = torch.ones(1)
    for name in CALLED_AT_REQUESTS:
        setattr(tower, name, twice)
    assert structure.is_unchanged() and not structure.change()
    tower.encoder_cudagraph_forward = twice
    assert structure.change().startswith("the tower: encoder_cudagraph_forward (<code object twice")


def test_the_methods_of_requests_are_those_of_the_protocol() -> None:
    methods = {name for name, value in vars(SupportsEncoderCudaGraph).items() if callable(value)}
    public = {name for name in methods if not name.startswith("_")}
    assert public == {FORWARD_OF_CAPTURES, *CALLED_AT_REQUESTS}


def test_hooks_that_collect_outputs_count_as_none_and_others_beside_them_are_seen() -> None:
    tower = Tower()
    structure = Structure(tower)
    collectors = [block.register_forward_hook(collect) for block in tower.blocks]
    assert structure.is_unchanged()
    tower.blocks[1].register_forward_hook(twice)
    assert structure.change() == "blocks.1: another hook than before"
    structure = Structure(tower)
    for each in collectors:
        each.remove()
    assert structure.is_unchanged()


def test_forwards_that_only_move_inputs_count_as_none() -> None:
    """As accelerate's are, where weights stay on their device."""

    class AlignDevicesHook:
        offload = False

    tower = Tower()
    structure = Structure(tower)
    tower.blocks[0]._hf_hook = AlignDevicesHook()  # type: ignore[assignment]
    tower.blocks[0].forward = twice  # type: ignore[assignment]
    assert structure.is_unchanged() and not structure.additions
    tower.blocks[0]._hf_hook.offload = True
    assert set(Structure(tower).additions) == {("blocks.0", "forward")}


def test_around_captures_the_towers_own_hooks_and_forward_may_change() -> None:
    tower = Tower()
    structure = Structure(tower, is_around=True)
    tower.register_forward_hook(twice)
    tower.forward = types.MethodType(twice, tower)  # type: ignore[method-assign]
    assert structure.is_unchanged()
    tower.blocks[0].register_forward_hook(twice)
    assert structure.change() == "blocks.0: another hook than before"


def test_modules_in_training_are_those_that_compute_something_else_there() -> None:
    tower = Tower().eval()
    structure = Structure(tower)
    tower.blocks.train()
    tower.training = True
    assert structure.in_training() is None and not any(structure.modes)
    tower.dropout.train()
    assert structure.in_training() == "dropout" and any(structure.modes)
    tower.dropout.p = 0.0
    assert Structure(tower).in_training() is None


def test_the_order_of_modules_counts() -> None:
    tower = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    structure = Structure(tower)
    tower["first"] = tower.pop("first")
    assert structure.change() == "modules in another order than before"

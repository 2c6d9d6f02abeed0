"""A registered tower, captured, and how its items are judged: by the tower's own eager forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

import fxsplit_encoder as fx
from fxsplit_encoder.backend import dispatchers
from fxsplit_encoder.towers.tiles import MASKED_ATTENTION_TAKES_UNKNOWN_SIZES

from . import tiny_towers
from .tiny_inputs import Inputs, Item, items
from .tiny_towers import tiny

ITEMS, FRAMES = 4, 8
"""Limits of a batch."""


@dataclass(frozen=True)
class Case:
    """A wrapped tower, captured by the first test that asks for a manager of it."""

    name: str
    tower: Any
    inputs: Inputs
    made: dict[str, fx.EncoderCudaGraphManager] = field(default_factory=dict)
    known: dict[Item, Tensor] = field(default_factory=dict)
    """Embeddings of the weights that the tower has outside of tests."""

    @property
    def manager(self) -> fx.EncoderCudaGraphManager:
        """In mode `full`, with a capture of every budget."""
        return self.manager_in("full")

    def manager_in(self, mode: str) -> fx.EncoderCudaGraphManager:
        """The tower is traced once for all modes; `breakable` runs the untouched module."""
        if mode in self.made:
            return self.made[mode]
        config = fx.EncoderConfig(
            mode=mode,
            piece_compiler="eager",
            paths={path: {"token_budgets": budgets} for path, budgets in self.inputs.budgets.items()},
            max_items_per_batch=ITEMS,
            max_frames_per_batch=FRAMES if self.inputs.videos else None,
            exact_min_hits=1,
            debug=True,
        )
        manager = fx.EncoderCudaGraphManager(self.tower, config, log_interval=0)
        if mode == "full":
            torch._dynamo.reset()
        elif mode != "breakable":
            for name, path in manager.paths.items():
                path.bind(self.manager.paths[name].program)
        manager.capture()
        assert manager.reports == []
        self.made[mode] = manager
        return manager

    @property
    def images(self) -> list[Item]:
        return items("image", self.inputs.images)

    @property
    def videos(self) -> list[Item]:
        return items("video", self.inputs.videos, first_seed=50)

    def alone(self, item: Item) -> Tensor:
        """The embedding of an item by the tower's eager forward, in a batch of its own."""
        if item not in self.known:
            self.known[item] = self._encode(item)
        return self.known[item]

    def _encode(self, item: Item) -> Tensor:
        batch = self.inputs.make([item])
        (spec,) = self.tower.get_encoder_cudagraph_item_specs(batch)
        paths = [name for name, count in self.inputs.path_tokens(item).items() if count]
        outputs = {path: self.tower.encoder_eager_forward(batch, path=path) for path in paths}
        (embedding,) = self.tower.items_of(outputs, [spec.output_tokens], batch)
        return embedding  # type: ignore[no-any-return]

    def check(self, batch: Sequence[Item], mode: str = "full") -> None:
        """Every item of a batch is the one that the tower makes of it alone."""
        got = self.manager_in(mode).execute(self.inputs.make(batch))
        hidden = self.tower.get_encoder_cudagraph_config().out_hidden_size
        for embedding, item in zip(got, batch, strict=True):
            expected = self.alone(item)
            assert tuple(expected.shape) == (self.inputs.tokens(item), hidden)
            assert embedding.untyped_storage().nbytes() == embedding.nbytes, "an item's memory is its own"
            assert expected.std() > 0.05
            torch.testing.assert_close(embedding, expected, rtol=1e-5, atol=1e-5)

    def misses_of(self, batch: Sequence[Item], mode: str = "full") -> dict[Any, int]:
        """Why items of this batch are served by no replay, and how many; they are right all the same."""
        before = self.manager_in(mode).stats()
        self.check(batch, mode)
        after = self.manager_in(mode).stats()
        assert after.items - before.items == len(batch)
        misses = {why: count - before.misses.get(why, 0) for why, count in after.misses.items()}
        misses = {why: count for why, count in misses.items() if count}
        assert after.hits - before.hits == len(batch) - sum(misses.values())
        return misses


def assert_modes_agree(case: Case) -> None:
    """Every mode makes the same items; nothing is traced after the first, and what fits is replayed."""
    assert case.manager.reports == []
    before = dict(counters["stats"])
    (exact,), (over,) = items("image", [case.inputs.exact]), items("image", [case.inputs.over], first_seed=90)
    batches = [[*case.images, *case.videos], [exact], [case.images[0], over, *case.images[1:]]]
    for mode in ("auto", "full", "piecewise", "exact", "breakable", "none"):
        misses = [case.misses_of(batch, mode) for batch in batches]
        if mode == "none":
            assert [sum(each.values()) for each in misses] == [len(batch) for batch in batches]
        else:
            over_budget = {} if mode == "exact" else {fx.MissReason.OVER_LARGEST_BUDGET: 1}
            assert misses == [{}, {}, over_budget], mode
    assert dict(counters["stats"]) == before


def assert_compiled_once(case: Case, **options: Any) -> None:
    """Behind `torch.compile` each view is one graph for calls of every size, replayed within the budgets."""
    known = set(dispatchers())
    torch._dynamo.reset()
    counters.clear()
    ladder = next(iter(case.inputs.budgets.values()))
    options = {"mode": "full", "token_budgets": list(ladder), "debug": True, **options}
    compiled = torch.compile(case.tower, backend="encoder_cg", fullgraph=True, options=options)
    with torch.no_grad():
        for arguments in case.inputs.calls():
            got, expected = compiled(*arguments), case.tower(*arguments)
            assert type(got) is type(expected)
            for a, b in zip(tree_leaves(got), tree_leaves(expected), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            assert not [name for each in arguments for name in vars(each) if name.startswith("_dynamo")]
    # A single tile is traced apart where a mask does not take an unknown number of them.
    is_apart = getattr(case.tower, "attends_with_mask", False) and not MASKED_ATTENTION_TAKES_UNKNOWN_SIZES
    assert counters["stats"]["unique_graphs"] == len(case.inputs.budgets) * (1 + is_apart)
    assert not counters["graph_break"]
    made = set(dispatchers()) - known
    assert all(each.program.padding.proved and each.hits for each in made)
    if len(case.inputs.budgets) == 1:
        (dispatcher,) = made
        assert dispatcher.hits == len(case.inputs.calls()) - 1
        assert dispatcher.misses == {fx.MissReason.OVER_LARGEST_BUDGET: 1}


def make_case(name: str) -> Case:
    """The tiny tower of a registered class."""
    model = tiny_towers.make(name)
    assert type(model).__name__ == name
    return Case(name, fx.wrap(model), tiny(name).inputs)

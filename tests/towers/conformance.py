"""A registered tower, captured, and how its items are judged: by the tower's own eager forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import fxsplit_encoder as fx

from . import tiny_towers
from .tiny_inputs import Inputs, Item, items
from .tiny_towers import tiny

ITEMS, FRAMES = 4, 8
"""Limits of a batch."""


@dataclass(frozen=True)
class Case:
    """A registered class, wrapped, and captured by the first test that asks for its manager."""

    name: str
    tower: Any
    inputs: Inputs

    @cached_property
    def manager(self) -> fx.EncoderCudaGraphManager:
        """With a capture of every budget."""
        torch._dynamo.reset()
        config = fx.EncoderConfig(
            mode="full",
            piece_compiler="eager",
            paths={path: {"token_budgets": budgets} for path, budgets in self.inputs.budgets.items()},
            max_items_per_batch=ITEMS,
            max_frames_per_batch=FRAMES if self.inputs.videos else None,
            debug=True,
        )
        manager = fx.EncoderCudaGraphManager(self.tower, config, log_interval=0)
        manager.capture()
        return manager

    @property
    def images(self) -> list[Item]:
        return items("image", self.inputs.images)

    @property
    def videos(self) -> list[Item]:
        return items("video", self.inputs.videos, first_seed=50)

    def alone(self, item: Item) -> Tensor:
        """The embedding of an item by the tower's eager forward, in a batch of its own."""
        batch = self.inputs.make([item])
        (spec,) = self.tower.get_encoder_cudagraph_item_specs(batch)
        paths = [name for name, count in self.inputs.path_tokens(item).items() if count]
        outputs = {path: self.tower.encoder_eager_forward(batch, path=path) for path in paths}
        embeddings: dict[int, Tensor] = {}
        self.tower.postprocess_encoder_output(
            outputs, [0], [spec.output_tokens], embeddings, batch_mm_kwargs=batch
        )
        return embeddings[0]

    def check(self, batch: Sequence[Item]) -> None:
        """Every item of a batch is the one that the tower makes of it alone."""
        got = self.manager.execute(self.inputs.make(batch))
        assert len(got) == len(batch)
        for embedding, item in zip(got, batch, strict=True):
            expected = self.alone(item)
            assert expected.std() > 0.05
            torch.testing.assert_close(embedding, expected, rtol=1e-5, atol=1e-5)

    def misses_of(self, batch: Sequence[Item]) -> dict[Any, int]:
        """Why items of this batch are served by no replay, and how many; they are right all the same."""
        before = self.manager.stats()
        self.check(batch)
        after = self.manager.stats()
        assert after.items - before.items == len(batch)
        misses = {why: count - before.misses.get(why, 0) for why, count in after.misses.items()}
        misses = {why: count for why, count in misses.items() if count}
        assert after.hits - before.hits == len(batch) - sum(misses.values())
        return misses


def make_case(name: str) -> Case:
    """The tiny tower of a registered class."""
    model = tiny_towers.make(name)
    assert type(model).__name__ == name
    return Case(name, fx.wrap(model), tiny(name).inputs)

"""Random packings of images and videos: which are encoded together, in which order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.towers.tiny_inputs import Inputs, Item

SIDES = (2, 2, 4, 4, 6, 8)


def packed_items(count: int, videos: bool = True) -> list[Item]:
    """Images and, every fourth, videos of random grids for packed towers, some of a single token."""
    numbers = random.Random(0)

    def size(modality: str) -> tuple[int, int, int]:
        frames = 1 if modality == "image" else numbers.randint(1, 4)
        return frames, numbers.choice(SIDES), numbers.choice(SIDES)

    kinds = ["video" if videos and number % 4 == 3 else "image" for number in range(count)]
    return [Item(kind, size(kind), number) for number, kind in enumerate(kinds)]


def tile_items(count: int) -> list[Item]:
    """Images of one to six tiles and videos of as many frames."""
    numbers = random.Random(0)
    kinds = ["video" if number % 4 == 3 else "image" for number in range(count)]
    return [Item(kind, (numbers.randint(1, 6),), number) for number, kind in enumerate(kinds)]


def packings(items: Sequence[Item], count: int, seed: int = 0) -> Iterator[list[list[Item]]]:
    """All items, in a random order, cut into batches at random; images before videos in each."""
    numbers = random.Random(seed)
    for _ in range(count):
        order = numbers.sample(items, len(items))
        batches = []
        while order:
            size = min(len(order), numbers.choice((1, 2, 3, 5, 8, 13)))
            batch, order = order[:size], order[size:]
            batches.append(sorted(batch, key=lambda item: item.modality))
        yield batches


def differing(
    manager: Any, inputs: Inputs, batches: Sequence[list[Item]], alone: dict[Item, Tensor]
) -> list[str]:
    """The items of some batches that get other bits than alone."""
    found = []
    for batch in batches:
        for item, result in zip(batch, manager.execute(inputs.make(batch)), strict=True):
            if not torch.equal(result, alone[item]):
                error = (result.float() - alone[item].float()).abs().max()
                found.append(f"{item} among {len(batch)}: {error:.1e}")
    return found

"""`invariant: true` in a manager: what was chosen to keep it, and whether it is kept."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxsplit_encoder.kernels import describe_environment
from fxsplit_encoder.manager.item_facts import select_items
from fxsplit_encoder.manager.legacy_dual_path import read_item_specs

if TYPE_CHECKING:
    from fxsplit_encoder.manager.manager import EncoderCudaGraphManager


def findings(manager: EncoderCudaGraphManager) -> list[str]:
    """Which kernels keep it, a line each, as far as anything has run."""
    from fxsplit_encoder.products.fixed import PRODUCTS

    attention = [f"attention of {chosen}" for chosen in manager.kernels.attention.chosen]
    return [f"invariant: {each}" for each in (*attention, *PRODUCTS.describe(manager.device))]


def choices(manager: EncoderCudaGraphManager) -> list[str]:
    """What decides over the bits beside tower and inputs: the same in processes that give the same."""
    from fxsplit_encoder.products.fixed import PRODUCTS

    device = manager.device
    known: dict[str, Any] = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    if device.type == "cuda":
        known = describe_environment(device)
    return [
        *(f"{name} {value}" for name, value in known.items()),
        *manager.kernels.attention.chosen,
        *PRODUCTS.choices(device),
    ]


def differing_items(
    manager: EncoderCudaGraphManager, mm_kwargs: dict[str, Any], packings: int, seed: int
) -> list[int]:
    """See `EncoderCudaGraphManager.check_invariance`."""
    count = len(read_item_specs(manager.tower, mm_kwargs))

    def encoded(indices: Sequence[int]) -> list[Tensor]:
        num_axes = len(manager.model_config.capture_axes)
        return manager.execute(select_items(manager.tower, mm_kwargs, indices, num_axes)[0])

    alone = [encoded([index])[0] for index in range(count)]
    numbers = random.Random(seed)
    differing: set[int] = set()
    for _ in range(packings if count else 0):
        indices = sorted(numbers.sample(range(count), numbers.randint(1, count)))
        results = zip(indices, encoded(indices), strict=True)
        differing |= {index for index, result in results if not torch.equal(result, alone[index])}
    return sorted(differing)

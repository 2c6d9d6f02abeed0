"""`invariant: true` in a manager: what was chosen to keep it, and whether it is kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.kernels import describe_environment
from fxsplit_encoder.manager.tower import read_item_specs, read_model_config, select_items
from fxsplit_encoder.protocol import SupportsEncoderCudaGraph
from fxsplit_encoder.runtime import Choosers


def findings(kernels: Choosers, device: torch.device) -> list[str]:
    """Which kernels keep it, a line each, as far as anything has run."""
    from fxsplit_encoder.kernels.products.fixed import PRODUCTS

    attention = [f"attention of {chosen}" for chosen in kernels.attention.chosen]
    return [f"invariant: {each}" for each in (*attention, *PRODUCTS.describe(device))]


def choices(kernels: Choosers, device: torch.device) -> list[str]:
    """What decides over the bits beside tower and inputs: the same in processes that give the same."""
    from fxsplit_encoder.kernels.products.fixed import PRODUCTS

    known: dict[str, Any] = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    if device.type == "cuda":
        known = describe_environment(device)
    return [
        *(f"{name} {value}" for name, value in known.items()),
        *kernels.attention.chosen,
        *PRODUCTS.choices(device),
    ]


def differing_items(
    tower: SupportsEncoderCudaGraph,
    execute: Callable[[dict[str, Any]], list[Tensor]],
    mm_kwargs: dict[str, Any],
    packings: int,
    seed: int,
) -> list[int]:
    """See `EncoderCudaGraphManager.check_invariance`."""
    count = len(read_item_specs(tower, mm_kwargs))
    num_axes = len(read_model_config(tower).capture_axes)

    def encoded(indices: Sequence[int]) -> list[Tensor]:
        return execute(select_items(tower, mm_kwargs, indices, num_axes)[0])

    alone = [encoded([index])[0] for index in range(count)]
    numbers = random.Random(seed)
    differing: set[int] = set()
    for _ in range(packings if count else 0):
        indices = sorted(numbers.sample(range(count), numbers.randint(1, count)))
        results = zip(indices, encoded(indices), strict=True)
        differing |= {index for index, result in results if not torch.equal(result, alone[index])}
    return sorted(differing)

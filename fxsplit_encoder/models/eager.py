"""A tower as it came, to compare with its wrapped copy: what the manager's results are compared with.

Where a model is transformers', these are its own methods with its own attention ("sdpa"); where it is ours,
the adapter's eager forward. All return every item's rows one after the other.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder.towers.packed import PackedTower

Inputs = Mapping[str, Any]
EagerForward = Callable[[Any, Inputs], Tensor]
"""From a module and `mm_kwargs` to rows, (output tokens, hidden)."""

PIXELS, GRIDS = zip(*PackedTower.input_keys, strict=True)
"""Keys of images and of clips."""


def share_weights(module: nn.Module) -> nn.Module:
    """A copy with the same parameters and an attention, caches and hooks of its own."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


class EagerTower:
    """Encodes `mm_kwargs` without this library's captures, one tensor per item."""

    def __init__(
        self, module: nn.Module, forward: EagerForward | None, wrap: Callable[[nn.Module], Any]
    ) -> None:
        self.module = module
        self.adapter = wrap(module if forward is None else share_weights(module))
        self._forward = forward

    @torch.no_grad()
    def __call__(self, mm_kwargs: Inputs) -> list[Tensor]:
        """The embedding of every item."""
        dtype = next(self.module.parameters()).dtype
        tensors = as_tensors(mm_kwargs)
        batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}
        specs = self.adapter.get_encoder_cudagraph_item_specs(batch)
        tokens = [spec.output_tokens for spec in specs]
        if self._forward is not None:
            return list(torch.split(self._forward(self.module, batch), tokens))
        paths = self.adapter.get_encoder_cudagraph_config().paths
        used = [path for path in paths if any(spec.path_output_tokens.get(path, 1) for spec in specs)]
        outputs = {path: self.adapter.encoder_eager_forward(batch, path=path) for path in used}
        items: list[Tensor] = self.adapter.items_of(outputs, tokens, batch)
        return items


def as_tensors(mm_kwargs: Inputs) -> dict[str, Tensor]:
    """The inputs, each in one tensor: selected items may come as several."""
    return {
        name: torch.cat(list(value))
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor)
        else torch.as_tensor(value, device=getattr(value, "device", "cpu"))
        for name, value in mm_kwargs.items()
    }


def joined(mm_kwargs: Inputs, names: Sequence[str]) -> Tensor:
    """Images, then clips, as the keys of both name them."""
    return torch.cat([mm_kwargs[name] for name in names if name in mm_kwargs])


# --- how far apart outputs are


def max_error(items: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of a value."""
    return max((a.float() - b.float()).abs().max().item() for a, b in zip(items, expected, strict=True))


def rms_error(items: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The root mean square of the differences of all values."""
    total = sum((a.float() - b.float()).square().sum().item() for a, b in zip(items, expected, strict=True))
    return math.sqrt(total / sum(b.numel() for b in expected))

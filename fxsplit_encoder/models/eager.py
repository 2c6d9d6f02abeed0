"""A tower as it came, beside its wrapped copy: what the manager's results are compared with.

Where a model is transformers', these are its own methods with its own attention ("sdpa"); where it is ours,
the adapter's eager forward. All return every item's rows one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder.manager.dual_path import read_model_config

Inputs = Mapping[str, Any]
EagerForward = Callable[[Any, Inputs], Tensor]
"""From a module and `mm_kwargs` to rows, (output tokens, hidden)."""

_PIXELS = ("pixel_values", "pixel_values_videos")
_GRIDS = ("image_grid_thw", "video_grid_thw")


def share_weights(module: nn.Module) -> nn.Module:
    """A copy with the same parameters and an attention, caches and hooks of its own."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


class EagerTower:
    """Encodes `mm_kwargs` without this library's captures, an item a tensor.

    Args:
        module: the tower that nobody wrapped.
        forward: its family's eager forward; None: the adapter's own.
        wrap: makes the adapter.
    """

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
        paths = read_model_config(self.adapter).paths
        used = [path for path in paths if any(spec.path_output_tokens.get(path, 1) for spec in specs)]
        outputs = {path: self.adapter.encoder_eager_forward(batch, path=path) for path in used}
        items: dict[int, Tensor] = {}
        self.adapter.postprocess_encoder_output(
            outputs, list(range(len(specs))), tokens, items, batch_mm_kwargs=batch
        )
        return [items[index] for index in range(len(specs))]


def as_tensors(mm_kwargs: Inputs) -> dict[str, Tensor]:
    """The inputs, each in one tensor: selected items may come as several."""
    return {
        name: torch.cat(list(value))
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor)
        else torch.as_tensor(value)
        for name, value in mm_kwargs.items()
    }


def packed(tower: Any, mm_kwargs: Inputs) -> Tensor:
    """The Qwen line and GLM: the main output, then the deepstack levels, along the hidden dimension."""
    pixels = torch.cat([mm_kwargs[name] for name in _PIXELS if name in mm_kwargs])
    grids = torch.cat([mm_kwargs[name] for name in _GRIDS if name in mm_kwargs])
    # To these towers a video is images, one a frame; GLM's takes nothing else.
    frames = torch.tensor([(1, h, w) for t, h, w in grids.tolist() for _ in range(t)])
    output = tower(pixels, grid_thw=frames.to(pixels.device))
    return torch.cat([output.pooler_output, *getattr(output, "deepstack_features", ())], dim=1)


def kimi_k25(tower: Any, mm_kwargs: Inputs) -> Tensor:
    """Kimi-K2.5: clips of different lengths one after the other, since the tower takes one length a call."""
    rows = []
    for pixels_name, grids_name in zip(_PIXELS, _GRIDS, strict=True):
        if pixels_name not in mm_kwargs:
            continue
        grids = mm_kwargs[grids_name]
        parts = mm_kwargs[pixels_name].split(grids.prod(1).tolist())
        start = 0
        for length in torch.unique_consecutive(grids[:, 0], return_counts=True)[1].tolist():
            end = start + length
            pixels = torch.cat(parts[start:end])
            pixels = pixels.view(-1, *tower.patch_embed.proj.weight.shape[1:])
            rows.append(tower(pixels, grids[start:end].to(pixels.device)).pooler_output.flatten(1))
            start = end
    return torch.cat(rows)


def internvl(model: Any, mm_kwargs: Inputs) -> Tensor:
    """InternVL: a frame of a clip is a tile."""
    tiles = torch.cat([mm_kwargs[name] for name in _PIXELS if name in mm_kwargs])
    features: Tensor = model.get_image_features(tiles, return_dict=True).pooler_output
    return features.flatten(0, 1)


def llama4(model: Any, mm_kwargs: Inputs) -> Tensor:
    """Llama 4 with its projector, which the model applies past `get_image_features`; a bare tower without."""
    tower = getattr(model, "vision_model", model)
    features: Tensor = tower(mm_kwargs["pixel_values"], return_dict=True).last_hidden_state
    projector = getattr(model, "multi_modal_projector", None)
    return (features if projector is None else projector(features)).flatten(0, 1)


def step3p7(model: Any, mm_kwargs: Inputs) -> Tensor:
    """Step-3.7; a bare tower has no method for both views."""
    counts = mm_kwargs["num_local_patches"].tolist()
    crops = mm_kwargs["pixel_values_local"] if sum(counts) else None
    if hasattr(model, "get_image_features"):
        merged = model.get_image_features(mm_kwargs["pixel_values"], crops, counts, return_dict=True)
        return torch.cat(merged.pooler_output)
    whole = model(mm_kwargs["pixel_values"]).last_hidden_state
    parts = iter(model(crops).last_hidden_state if crops is not None else ())
    rows = [[next(parts) for _ in range(n)] + [image] for n, image in zip(counts, whole, strict=True)]
    return torch.cat([row for image in rows for row in image])


def dense(tower: Any, mm_kwargs: Inputs, rows: slice = slice(None)) -> Tensor:
    """A tower of one image size; `rows`: those of an image that are kept."""
    features: Tensor = tower(mm_kwargs["pixel_values"]).last_hidden_state
    return features[:, rows].flatten(0, 1)

"""Pixtral's vision tower: images of any size, packed, with rotary positions only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.grid import Grid
from fxsplit_encoder.towers.packed import PackedTower


class PixtralTower(PackedTower):
    """Wraps `PixtralVisionModel`. `mm_kwargs` are `pixel_values` (patches, channels * patch_size ** 2), as
    `patches` cuts them, and `image_grid_thw` (images, 3). An embedding is (patches, hidden_size) of each of
    the hidden states `layers`: 0 is the input of the first layer, the last the tower's output.
    """

    has_plain_blocks = True
    metadata_columns: Mapping[str, tuple[int, torch.dtype]] = {"position_ids": (2, torch.int64)}
    modalities: Sequence[str] = ("image",)
    max_frames_per_video: int = 1
    input_names: Sequence[str] = ("pixel_values", "image_grid_thw")

    def __init__(self, tower: nn.Module, layers: Sequence[int]) -> None:
        config: Any = tower.config
        self.layers = tuple(layers)
        self.patch_size: int = config.patch_size
        super().__init__(
            tower,
            merge_size=1,
            patch_features=config.num_channels * config.patch_size**2,
            out_hidden_size=config.hidden_size * len(self.layers),
        )
        rotary: Any = self.tower.patch_positional_embedding
        # Before transformers 5.17 positions are numbers of a square grid.
        self.grid_side: int | None = None
        if not hasattr(rotary, "recomposition_frequencies"):
            self.grid_side = config.image_size // config.patch_size

    def patches(self, image: Tensor) -> Tensor:
        """(patches, features) of an image (channels, height, width), row by row, as the weights lie."""
        channels, height, width = image.shape
        side = self.patch_size
        cut = image.view(channels, height // side, side, width // side, side)
        return cut.permute(1, 3, 0, 2, 4).reshape(-1, self.patch_features)

    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Row and column of every patch; before transformers 5.17 its number and a zero."""
        positions = grids_of.positions(grids, merge_size=1)
        if self.grid_side is not None:
            # Here rather than in the graph, where a lookup of computed indices is not known to be in range.
            numbers = positions[:, 0] * self.grid_side + positions[:, 1]
            positions = torch.stack([numbers, torch.zeros_like(numbers)], dim=1)
        return {"position_ids": positions}

    def core(self, pixel_values: Tensor, cu_seqlens: Tensor, metadata: dict[str, Tensor]) -> Any:
        """The tower's layers over packed patches; its convolution is a matrix product."""
        tower = self.tower
        hidden = F.linear(pixel_values, tower.patch_conv.weight.flatten(1))[None]
        hidden = tower.ln_pre(hidden)
        positions = metadata["position_ids"]
        if self.grid_side is not None:
            positions = positions[:, 0]
        rotary = tower.patch_positional_embedding(hidden, positions)
        segments = {"cu_seq_lens_q": cu_seqlens, "max_length_q": pixel_values.shape[0]}
        states = [hidden]
        for layer in tower.transformer.layers:
            hidden = layer(hidden, None, position_embeddings=rotary, **segments)
            states.append(hidden)
        return BaseModelOutput(last_hidden_state=hidden, hidden_states=tuple(states))

    def packed_output(self, output: Any) -> Tensor:
        """The layers, one after the other along the hidden dimension."""
        return torch.cat([output.hidden_states[layer][0] for layer in self.layers], dim=-1)

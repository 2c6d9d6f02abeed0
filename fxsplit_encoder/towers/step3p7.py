"""Step3, Step-3.7 and Step3-VL-10B: images seen as a whole and, if they are large, as crops."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from fxsplit_encoder.kernels.attention.hugging_face import use_varlen_attention
from fxsplit_encoder.towers.folded import FoldedTable, resized_positions, sides_of
from fxsplit_encoder.towers.tiles import (
    DenseTower,
    TiledTower,
    View,
    downsampled,
    square_view,
)


class Step3VLTower(TiledTower):
    """Wraps `Step3VisionModel`. `mm_kwargs`: `pixel_values` (images, 3, 728, 728), `num_patches` (images),
    `patch_pixel_values` (crops, 3, 504, 504). An embedding is 81 rows a crop, then 169 of the whole image.
    """

    has_plain_blocks = True
    count_key: ClassVar[str] = "num_patches"

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        super().__init__(
            tower,
            whole=_step3_view("pixel_values", config.image_size, config),
            crop=_step3_view("patch_pixel_values", config.crop_size, config),
            out_hidden_size=config.out_hidden_size,
        )

    def encode(self, tiles: Tensor, path: str) -> Tensor:
        """The features of tiles."""
        features: Tensor = self.tower(tiles)
        return features.flatten(0, 1)


def _step3_view(input_name: str, size: int, config: Any) -> View:
    tokens = downsampled(size // config.patch_size // 2) ** 2
    return square_view(input_name, size, config.patch_size, tokens)


CROP_SIZE = 504
"""Pixels per side of the crops that the model's image processor makes."""


class Step3p7Tower(TiledTower):
    """Wraps `Step3p7VisionModel`, or `Step3p7Model` for embeddings in the language model's width; the
    module's own forward is the vision model's. `mm_kwargs`: `pixel_values` (images, 3, 728, 728),
    `num_local_patches` (images), and `pixel_values_local` (crops, 3, crop_size, crop_size) of all images. An
    embedding is the rows of its crops, 81 each at 504 pixels, then the 169 of the whole image.
    """

    has_plain_blocks = True
    count_key: ClassVar[str] = "num_local_patches"

    def __init__(self, model: nn.Module, *, crop_size: int = CROP_SIZE) -> None:
        tower: Any = getattr(model, "vision_model", model)
        config = tower.config
        projector = getattr(model, "multi_modal_projector", None)
        super().__init__(
            tower,
            whole=_view("pixel_values", config.image_size, config.patch_size),
            crop=_view("pixel_values_local", crop_size, config.patch_size),
            out_hidden_size=4 * config.hidden_size if projector is None else projector.out_features,
            children=None
            if projector is None
            else {"vision_model": tower, "multi_modal_projector": projector},
        )
        use_varlen_attention(tower)
        self.projects = projector is not None
        sides = sides_of((config.image_size, crop_size), config.patch_size)
        resize = functools.partial(resized_positions, mode="bilinear", leading=0, antialias=False)
        self.positions = FoldedTable("tower.embeddings.position_embedding.weight", resize, sides)
        self.rotations = FoldedTable("tower.rotary_emb.inv_freq", self._rotation, sides)
        self.fold_tables()

    def encode(self, tiles: Tensor, path: str) -> Tensor:
        """The features of tiles, projected where there is a projector."""
        features = self.plain_features(tiles)
        rows: Tensor = (self.multi_modal_projector(features) if self.projects else features).flatten(0, 1)
        return rows

    def forward(self, pixel_values: Tensor) -> Any:
        """The vision model's forward and output; only tiles of the two folded sizes use tables."""
        side = pixel_values.shape[-1] // self.tower.config.patch_size
        if side not in self.positions.sides or pixel_values.shape[-1] != pixel_values.shape[-2]:
            return self.tower(pixel_values)
        self.trace_plain_blocks_once()
        features: Any = self.plain_features(pixel_values)
        return BaseModelOutput(last_hidden_state=features)

    def plain_features(self, tiles: Tensor) -> Tensor:
        """(tiles, tokens, 4 * hidden_size) from tiles, by the vision model without its position tables."""
        tower: Any = self.tower
        side = tiles.shape[-1] // tower.config.patch_size
        embedded = tower.embeddings.patch_embedding(tiles.to(self.dtype)).flatten(2).transpose(1, 2)
        x_NSC = tower.pre_layernorm(embedded + self.positions(side))
        cos, sin = self.rotations(side).unbind(0)
        for layer in tower.layers:
            x_NSC = layer(x_NSC, position_embeddings=(cos, sin))
        x_NCHW = torch.unflatten(x_NSC.transpose(1, 2), 2, (side, side))
        features: Tensor = tower.downsampler2(tower.downsampler1(x_NCHW)).flatten(2).transpose(1, 2)
        return features

    def _rotation(self, frequencies: Tensor, side: int) -> Tensor:
        """(2, side * side, head_dim): cosines and sines of every position's row and column."""
        position = torch.arange(side, device=frequencies.device)
        rows, columns = torch.meshgrid(position, position, indexing="ij")
        positions = torch.stack((rows, columns), dim=-1).flatten(0, 1)
        # The order of frequencies is the library's: it has changed between its versions.
        return torch.stack(self.tower.rotary_emb(frequencies, positions))


class Step3p7Tiles(DenseTower):
    """Wraps `Step3p7VisionModel` for tiles of one size: (tokens, 4 * hidden_size), not projected."""

    has_plain_blocks = True

    def __init__(self, tower: nn.Module, size: int) -> None:
        # Its tables become submodules of the tower, and so of this module.
        views = Step3p7Tower(tower, crop_size=size)
        view = views.views["local"]
        super().__init__(
            tower, tile_shape=view.shape, tokens_per_tile=view.tokens, out_hidden_size=views.out_hidden_size
        )
        self._features = views.plain_features

    def features(self, tiles: Tensor) -> Tensor:
        """The features of tiles."""
        return self._features(tiles)


def _view(input_name: str, size: int, patch_size: int) -> View:
    return square_view(input_name, size, patch_size, downsampled(downsampled(size // patch_size)) ** 2)

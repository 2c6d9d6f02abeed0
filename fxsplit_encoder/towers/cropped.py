"""Adapters of towers that see an image whole and as crops: DeepSeek-OCR, Step3, Step-3.7 and Step3-VL-10B."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.kernels.attention.hugging_face import use_varlen_attention
from fxsplit_encoder.towers.folded import FoldedTable, resized_positions
from fxsplit_encoder.towers.tiles import CropGrid, DenseTower, TiledTower, View, read_counts


class DeepseekOcrTower(TiledTower):
    """Wraps `DeepseekOcrVisionModel`. `mm_kwargs`: `pixel_values` (images, 3, base_size, base_size);
    `images_spatial_crop` (images, 2), columns and rows of crops, (1, 1) for none; `images_crop` (crops, 3,
    image_size, image_size) of all images, row by row.

    With s = base_size / 64 and c = image_size / 64 an embedding is its crops' features as one grid of (c
    rows) x (c columns), the whole image's s x s, both with a newline after every row, and the view separator:
    (c rows)(c columns + 1) + s (s + 1) + 1 rows, without crops s (s + 1) + 1.
    """

    attends_with_mask = True  # SAM's relative positions
    has_plain_blocks = True
    count_key: ClassVar[str] = "images_spatial_crop"

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        self.crop_side: int = config.image_size // config.pixels_per_feature
        side = config.base_size // config.pixels_per_feature
        patch_size = config.sam.patch_size
        views = {
            "global": _square_view("pixel_values", config.base_size, patch_size, side * (side + 1)),
            "local": _square_view("images_crop", config.image_size, patch_size, self.crop_side**2),
        }
        super().__init__(tower, views, config.out_hidden_size)

    def crop_grids(self, mm_kwargs: dict[str, Any]) -> list[CropGrid]:
        """The crops of every image; a single one is the image itself, and is not encoded."""
        crops = mm_kwargs.get(self.count_key)
        if crops is None:
            raise InputError(
                f"{self.count_key}: expected the columns and rows of crops of every image in pixel_values; "
                "got None; pass both"
            )
        return [
            (columns, rows) if columns * rows > 1 else (0, 0)
            for columns, rows in read_counts(crops, self.count_key, 2)
        ]

    def select_grids(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """`images_spatial_crop` of some images."""
        crops = read_counts(mm_kwargs[self.count_key], self.count_key, 2)
        return {self.count_key: [crops[i] for i in indices]}

    def num_tokens(self, crops: CropGrid) -> int:
        """Rows of an image's embedding, newlines and separator included."""
        columns, rows = (self.crop_side * n for n in crops)
        newlines_and_crops = rows * (columns + 1)
        return newlines_and_crops + self.views["global"].tokens + 1

    def encode(self, tiles: Tensor, path: str) -> Tensor:
        """The features of tiles; those of whole images with their newlines."""
        features_NSC: Tensor = self.tower(tiles)
        if path == "local":
            return features_NSC.flatten(0, 1)
        side = tiles.shape[-1] // self.tower.config.pixels_per_feature
        grid_NHWC = F.pad(torch.unflatten(features_NSC, 1, (side, side)), (0, 0, 0, 1))
        # Added to zeros: a newline that were joined on would have to be repeated for every tile first.
        newlines_HWC = F.pad(self.tower.image_newline.expand(side, 1, -1), (0, 0, side, 0))
        return (grid_NHWC + newlines_HWC).flatten(0, 2)

    def assemble(self, whole: Tensor, tiles: Tensor, crops: CropGrid) -> Tensor:
        """Crops as one grid with newlines, the whole image, the separator."""
        separator = self.tower.view_seperator[None].to(whole.dtype)
        if not tiles.shape[0]:
            return torch.cat((whole, separator))
        columns, rows = crops
        side = self.crop_side
        grid = (
            tiles.view(rows, columns, side, side, -1).transpose(1, 2).reshape(rows * side, columns * side, -1)
        )
        newlines = self.tower.image_newline.to(whole.dtype).expand(rows * side, 1, -1)
        return torch.cat((torch.cat((grid, newlines), dim=1).flatten(0, 1), whole, separator))


class Step3VLTower(TiledTower):
    """Wraps `Step3VisionModel`. `mm_kwargs`: `pixel_values` (images, 3, 728, 728), `num_patches` (images),
    `patch_pixel_values` (crops, 3, 504, 504). An embedding is 81 rows a crop, then 169 of the whole image.
    """

    has_plain_blocks = True
    count_key: ClassVar[str] = "num_patches"

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        views = {
            "global": _step3_view("pixel_values", config.image_size, config),
            "local": _step3_view("patch_pixel_values", config.crop_size, config),
        }
        super().__init__(tower, views, config.out_hidden_size)

    def encode(self, tiles: Tensor, path: str) -> Tensor:
        """The features of tiles."""
        features: Tensor = self.tower(tiles)
        return features.flatten(0, 1)


def _step3_view(input_name: str, size: int, config: Any) -> View:
    tokens = _downsampled(size // config.patch_size // 2) ** 2
    return _square_view(input_name, size, config.patch_size, tokens)


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
        width, children = 4 * config.hidden_size, None
        if projector is not None:
            width = projector.out_features
            children = {"vision_model": tower, "multi_modal_projector": projector}
        views = {
            "global": _view("pixel_values", config.image_size, config.patch_size),
            "local": _view("pixel_values_local", crop_size, config.patch_size),
        }
        super().__init__(tower, views, width, children)
        use_varlen_attention(tower)
        self.projects = projector is not None
        sides = [size // config.patch_size for size in (config.image_size, crop_size)]
        resize = functools.partial(resized_positions, mode="bilinear", leading=0, antialias=False)
        self.positions = FoldedTable("tower.embeddings.position_embedding.weight", resize, sides)
        self.rotations = FoldedTable("tower.rotary_emb.inv_freq", self._rotation, sides)

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
        super().__init__(tower, View("pixel_values", view.shape, view.tokens), views.out_hidden_size)
        self._features = views.plain_features

    def features(self, tiles: Tensor) -> Tensor:
        """The features of tiles."""
        return self._features(tiles)


def _view(input_name: str, size: int, patch_size: int) -> View:
    return _square_view(input_name, size, patch_size, _downsampled(_downsampled(size // patch_size)) ** 2)


def _square_view(input_name: str, size: int, patch_size: int, tokens: int) -> View:
    """Square tiles of three channels, `size` pixels per side, whose patches attend to one another."""
    return View(input_name, (3, size, size), tokens, input_size=(size // patch_size) ** 2)


def _downsampled(side: int) -> int:
    """Positions per side after a convolution of 3 x 3 with stride 2 and padding 1."""
    return (side + 1) // 2

"""Step3's vision encoder: a transformer whose layer norms follow its branches, two convolutions, a projector.
Parameters have the names by which serving engines load the checkpoint stepfun-ai/step3.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxsplit_encoder.models.encoders.transformer import ClassEmbeddings, EncoderLayers, check_tiles
from fxsplit_encoder.towers.folded import FoldedTables

# The model was trained with its class token four times over, so that the length divides by eight ranks.
_CLASS_TOKENS = 4


@dataclass(frozen=True)
class Step3VisionConfig:
    """Sizes under the names of the checkpoint's `vision_config`; by default those of stepfun-ai/step3."""

    image_size: int = 728
    """Pixels a side of a whole image, whose positions are stored; those of crops are interpolated."""
    crop_size: int = 504
    patch_size: int = 14
    hidden_size: int = 1792
    num_hidden_layers: int = 63
    num_attention_heads: int = 16
    intermediate_size: int = 15360
    layer_norm_eps: float = 1e-5
    output_hidden_size: int = 4096
    """Of the first convolution; the second has twice as many."""
    out_hidden_size: int = 7168
    projector_bias: bool = True


class Step3VisionModel(nn.Module):
    """Square tiles to rows in the language model's width."""

    def __init__(self, config: Step3VisionConfig | None = None) -> None:
        super().__init__()
        config = config or Step3VisionConfig()
        self.config = config
        layers = EncoderLayers(config, norms_follow=True)
        self.vision_model = nn.Sequential(OrderedDict(embeddings=_Embeddings(config), transformer=layers))
        channels = config.output_hidden_size
        self.vit_downsampler = nn.Conv2d(config.hidden_size, channels, 2, stride=2)
        self.vit_downsampler2 = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.vit_large_projector = nn.Linear(2 * channels, config.out_hidden_size, bias=config.projector_bias)
        self._tables = FoldedTables(self)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(tiles, 3, size, size) to (tiles, tokens, out_hidden_size), row by row. `size` is `image_size` or
        `crop_size`, else InputError; a tile of 728 pixels makes 169 rows, one of 504 pixels 81.
        """
        check_tiles(pixel_values, (self.config.image_size, self.config.crop_size))
        if not torch.compiler.is_compiling():
            self._tables.refresh()
        side = pixel_values.shape[-1] // self.config.patch_size
        tokens = self.vision_model(pixel_values)[:, _CLASS_TOKENS:]
        x_NCHW = torch.unflatten(tokens.transpose(1, 2), 2, (side, side))
        features = self.vit_downsampler2(self.vit_downsampler(x_NCHW)).flatten(2).transpose(1, 2)
        rows: Tensor = self.vit_large_projector(features)
        return rows


class _Embeddings(ClassEmbeddings):
    def __init__(self, config: Step3VisionConfig) -> None:
        sides = [size // config.patch_size for size in (config.image_size, config.crop_size)]
        super().__init__(config, sides, count=_CLASS_TOKENS)
        self.class_embedding = nn.Parameter(torch.zeros(1, config.hidden_size))  # as in the checkpoint

    def forward(self, pixel_values: Tensor) -> Tensor:
        return super().forward(self.patch_embedding(pixel_values))

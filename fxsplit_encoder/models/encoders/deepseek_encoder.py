"""DeepSeek-OCR's vision encoder (arXiv 2510.18234): SAM's features, CLIP over them, and a linear projector.
Parameters have the names of the published checkpoint after the prefix `model.`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.encoders.transformer import ClassEmbeddings, EncoderLayers, check_tiles
from fxsplit_encoder.towers.folded import FoldedTable, FoldedTables, resized_grid


@dataclass(frozen=True)
class SamConfig:
    """Sizes; by default those of SAM ViT-B in DeepSeek-OCR."""

    image_size: int = 1024
    """Pixels a side of the images whose positions are stored; others are interpolated."""
    patch_size: int = 16
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    window_size: int = 14
    """Patches a side of an attention window."""
    global_layers: tuple[int, ...] = (2, 5, 8, 11)
    """The blocks that attend over the whole grid."""
    neck_channels: int = 256
    downsample_channels: tuple[int, int] = (512, 1024)
    """Channels of the two convolutions that each halve the grid."""
    layer_norm_eps: float = 1e-6


class SamVisionModel(nn.Module):
    """Square images to a feature map of a quarter of the patch grid's side. `sizes` are in pixels."""

    def __init__(self, config: SamConfig, sizes: Sequence[int]) -> None:
        super().__init__()
        side = config.image_size // config.patch_size
        sides = [size // config.patch_size for size in sizes]
        patches = nn.Conv2d(3, config.hidden_size, config.patch_size, stride=config.patch_size)
        self.patch_embed = nn.Sequential(OrderedDict(proj=patches))
        self.pos_embed = nn.Parameter(torch.zeros(1, side, side, config.hidden_size))
        self.positions = FoldedTable("pos_embed", _resized_positions, sides)
        self.blocks = nn.ModuleList(
            _Block(config, None if i in config.global_layers else config.window_size, side, sides)
            for i in range(config.num_hidden_layers)
        )
        channels = config.neck_channels
        self.neck = nn.Sequential(
            nn.Conv2d(config.hidden_size, channels, 1, bias=False),
            _ChannelNorm(channels, eps=config.layer_norm_eps),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            _ChannelNorm(channels, eps=config.layer_norm_eps),
        )
        half, quarter = config.downsample_channels
        self.net_2 = nn.Conv2d(channels, half, 3, stride=2, padding=1, bias=False)
        self.net_3 = nn.Conv2d(half, quarter, 3, stride=2, padding=1, bias=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(images, 3, size, size) to (images, channels, side / 4, side / 4), `side` in patches."""
        x_NHWC = self.patch_embed(pixel_values).permute(0, 2, 3, 1)
        x_NHWC = x_NHWC + self.positions(x_NHWC.shape[1])
        for block in self.blocks:
            x_NHWC = block(x_NHWC)
        features: Tensor = self.net_3(self.net_2(self.neck(x_NHWC.permute(0, 3, 1, 2))))
        return features


def _resized_positions(table: Tensor, side: int) -> Tensor:
    return resized_grid(table[0], side, "bicubic", antialias=True)


class _ChannelNorm(nn.LayerNorm):
    """Layer normalization over the channels of (images, channels, height, width)."""

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return super().forward(x_NCHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _Block(nn.Module):
    """Attention and MLP, each after a layer norm. Without `window_size` the whole grid is one window."""

    def __init__(self, config: SamConfig, window_size: int | None, side: int, sides: Sequence[int]) -> None:
        super().__init__()
        self.window_size = window_size
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        if window_size is None:
            self.attn = _Attention(config, side, sides)
        else:
            self.attn = _Attention(config, window_size, [window_size])
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = nn.Sequential(
            OrderedDict(
                lin1=nn.Linear(config.hidden_size, config.intermediate_size),
                gelu=nn.GELU(),
                lin2=nn.Linear(config.intermediate_size, config.hidden_size),
            )
        )

    def forward(self, x_NHWC: Tensor) -> Tensor:
        attended = self._attend(self.norm1(x_NHWC))
        x_NHWC = x_NHWC + attended
        y_NHWC: Tensor = x_NHWC + self.mlp(self.norm2(x_NHWC))
        return y_NHWC

    def _attend(self, x_NHWC: Tensor) -> Tensor:
        if self.window_size is None:
            attended: Tensor = self.attn(x_NHWC)
            return attended
        side, window = x_NHWC.shape[1], self.window_size
        # The grid is padded at its end; pad positions take part in the attention, as when it was trained.
        per_side = -(-side // window)
        missing = per_side * window - side
        padded = F.pad(x_NHWC, (0, 0, 0, missing, 0, missing))
        cut = padded.reshape(-1, per_side, window, per_side, window, padded.shape[-1]).transpose(2, 3)
        windows: Tensor = self.attn(cut.flatten(0, 2))
        joined = windows.view(-1, *cut.shape[1:]).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return joined[:, :side, :side]


def relative_positions(distances: Tensor, side: int) -> Tensor:
    """(side, side, channels): entry (q, k) is the embedding of the distance q - k along an axis (ViTDet,
    arXiv 2203.16527). `distances` are (2 L - 1, channels), from -(L - 1) to L - 1; others are interpolated.
    """
    length = 2 * side - 1
    if distances.shape[0] != length:
        resized = F.interpolate(distances.float().t()[None], size=length, mode="linear")
        distances = resized[0].t().to(distances.dtype)
    position = torch.arange(side, device=distances.device)
    return distances[position[:, None] - position[None, :] + side - 1]


class _Attention(nn.Module):
    """Attention over a square grid with decomposed relative positions: the score of a query and a key gets a
    term for the distance of their rows and one for their columns, the query times its embedding.
    """

    def __init__(self, config: SamConfig, side: int, sides: Sequence[int]) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        head_dim = config.hidden_size // config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.rel_pos_h = nn.Parameter(torch.zeros(2 * side - 1, head_dim))
        self.rel_pos_w = nn.Parameter(torch.zeros(2 * side - 1, head_dim))
        self.row_distances = FoldedTable("rel_pos_h", relative_positions, sides)
        self.column_distances = FoldedTable("rel_pos_w", relative_positions, sides)

    def forward(self, x_NHWC: Tensor) -> Tensor:
        side = x_NHWC.shape[1]
        qkv = torch.unflatten(self.qkv(x_NHWC.flatten(1, 2)), -1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        grid = torch.unflatten(q, 2, (side, side))
        rows = torch.einsum("nayxc,ykc->nayxk", grid, self.row_distances(side))
        columns = torch.einsum("nayxc,xkc->nayxk", grid, self.column_distances(side))
        bias = (rows[..., :, None] + columns[..., None, :]).flatten(4, 5).flatten(2, 3)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        y_NHWC: Tensor = torch.unflatten(self.proj(attended.transpose(1, 2).flatten(2)), 1, (side, side))
        return y_NHWC


@dataclass(frozen=True)
class ClipConfig:
    """Sizes; by default those of CLIP ViT-L/14."""

    image_size: int = 224
    """With `patch_size`: the grid whose positions are stored; others are interpolated."""
    patch_size: int = 14
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    layer_norm_eps: float = 1e-5


class ClipEncoder(nn.Sequential):
    """Feature maps (images, hidden_size, side, side), of these `sides`, to tokens (images, 1 + side * side,
    hidden_size): a class token, then the positions row by row.
    """

    def __init__(self, config: ClipConfig, sides: Sequence[int]) -> None:
        super().__init__()
        # CLIP's own patch embedding is in the checkpoint; the features take its place.
        self.embeddings = ClassEmbeddings(config, sides, bias=False)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)  # sic
        self.transformer = EncoderLayers(config)


# SAM's two strided convolutions each halve the grid.
_PATCHES_PER_FEATURE = 4


@dataclass(frozen=True)
class DeepseekOcrConfig:
    """Sizes; by default those of the published checkpoint and of its mode "Gundam". Other modes: (base_size,
    image_size) = (512, 512), (640, 640), (1024, 1024), (1280, 1280) and (1280, 1024).
    """

    base_size: int = 1024
    """Pixels a side of the view of a whole image."""
    image_size: int = 640
    """Pixels a side of a crop."""
    out_hidden_size: int = 1280
    sam: SamConfig = field(default_factory=SamConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)

    @property
    def pixels_per_feature(self) -> int:
        """Pixels along each side of the area of one output row."""
        return _PATCHES_PER_FEATURE * self.sam.patch_size


class DeepseekOcrVisionModel(nn.Module):
    """Square tiles to rows in the language model's width; InputError for sizes that do not fit together. The
    adapter inserts the learned rows `image_newline` and `view_seperator` (sic) between them.
    """

    def __init__(self, config: DeepseekOcrConfig | None = None) -> None:
        super().__init__()
        config = config or DeepseekOcrConfig()
        _check(config)
        sizes = (config.base_size, config.image_size)
        self.config = config
        self.sam_model = SamVisionModel(config.sam, sizes)
        self.vision_model = ClipEncoder(config.clip, [size // config.pixels_per_feature for size in sizes])
        projector = nn.Linear(2 * config.clip.hidden_size, config.out_hidden_size)
        self.projector = nn.Sequential(OrderedDict(layers=projector))
        self.image_newline = nn.Parameter(torch.zeros(config.out_hidden_size))
        self.view_seperator = nn.Parameter(torch.zeros(config.out_hidden_size))
        self._tables = FoldedTables(self)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(tiles, 3, size, size) to (tiles, side * side, out_hidden_size), row by row. `size` is `base_size`
        or `image_size`, else InputError; `side` is 16 for 1024 pixels and 10 for 640.
        """
        check_tiles(pixel_values, (self.config.base_size, self.config.image_size))
        if not torch.compiler.is_compiling():
            self._tables.refresh()
        local = self.sam_model(pixel_values)
        context = self.vision_model(local)
        rows: Tensor = self.projector(torch.cat((context[:, 1:], local.flatten(2).transpose(1, 2)), dim=-1))
        return rows


def _check(config: DeepseekOcrConfig) -> None:
    if config.sam.downsample_channels[1] != config.clip.hidden_size:
        raise InputError(
            f"SAM's features have {config.sam.downsample_channels[1]} channels; CLIP takes "
            f"{config.clip.hidden_size}: they must be equal"
        )
    for name, size in (("base_size", config.base_size), ("image_size", config.image_size)):
        if size < 1 or size % config.pixels_per_feature:
            raise InputError(
                f"{name}: expected a positive multiple of {config.pixels_per_feature} pixels; got {size}"
            )

"""Kimi-VL's vision part: MoonViT for images of any size, and the projector after it. `load_state_dict` takes
the tensors of moonshotai/Kimi-VL-A3B under `vision_tower.` and `multi_modal_projector.`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder.kernels.attention import varlen_attention
from fxsplit_encoder.towers.grid import merge, resample, rotate_pairs

_ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class KimiVLVisionConfig:
    """Sizes under the names of the checkpoint's `vision_config`; by default those of Kimi-VL-A3B."""

    hidden_size: int = 1152
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    intermediate_size: int = 4304
    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    merge_kernel_size: tuple[int, int] = (2, 2)
    text_hidden_size: int = 2048
    """Columns of the output; in the checkpoint it is `text_config`'s `hidden_size`."""

    @classmethod
    def from_checkpoint(cls, settings: Mapping[str, Any]) -> KimiVLVisionConfig:
        """From the contents of the model's config.json, with defaults for sizes that are left out."""
        vision = {k: v for k, v in settings["vision_config"].items() if k in cls.__dataclass_fields__}
        vision["merge_kernel_size"] = tuple(vision.get("merge_kernel_size", cls.merge_kernel_size))
        return cls(**vision, text_hidden_size=settings["text_config"]["hidden_size"])


class _PatchEmbedding(nn.Module):
    def __init__(self, config: KimiVLVisionConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        shape = (config.init_pos_emb_height, config.init_pos_emb_width, config.hidden_size)
        self.pos_emb: Any = nn.Module()
        self.pos_emb.weight = nn.Parameter(torch.randn(shape))

    def forward(self, pixel_values: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        patches: Tensor = self.proj(pixel_values).flatten(1)
        return patches + resample(self.pos_emb.weight.flatten(0, 1), indices, weights).to(patches.dtype)


class _Block(nn.Module):
    def __init__(self, config: KimiVLVisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.norm0 = nn.LayerNorm(config.hidden_size)
        self.norm1 = nn.LayerNorm(config.hidden_size)
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)
        self.mlp = nn.Sequential(
            OrderedDict(
                fc0=nn.Linear(config.hidden_size, config.intermediate_size),
                gelu=nn.GELU(approximate="tanh"),
                fc1=nn.Linear(config.intermediate_size, config.hidden_size),
            )
        )

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], cu_seqlens: Tensor) -> Tensor:
        hidden = hidden + self._attention(self.norm0(hidden), rotary, cu_seqlens)
        result: Tensor = hidden + self.mlp(self.norm1(hidden))
        return result

    def _attention(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], cu_seqlens: Tensor) -> Tensor:
        rows = hidden.shape[0]
        query, key, value = self.wqkv(hidden).view(rows, 3, self.num_heads, self.head_dim).unbind(1)
        cos, sin = rotary[0][:, None], rotary[1][:, None]
        query, key = rotate_pairs(query, cos, sin), rotate_pairs(key, cos, sin)
        # The patch count bounds every segment, whatever the batch.
        out = varlen_attention(query, key, value, cu_seqlens, rows, self.head_dim**-0.5)
        result: Tensor = self.wo(out.view(rows, -1))
        return result


class KimiVLVisionModel(nn.Module):
    """MoonViT and Kimi-VL's projector. The adapter computes the metadata that its forward takes."""

    def __init__(self, config: KimiVLVisionConfig) -> None:
        super().__init__()
        self.config = config
        encoder = {
            "blocks": nn.ModuleList(_Block(config) for _ in range(config.num_hidden_layers)),
            "final_layernorm": nn.LayerNorm(config.hidden_size),
        }
        self.vision_tower: Any = nn.ModuleDict(
            {"patch_embed": _PatchEmbedding(config), "encoder": nn.ModuleDict(encoder)}
        )
        height, width = config.merge_kernel_size
        merged = height * width * config.hidden_size
        self.multi_modal_projector = nn.Sequential(
            OrderedDict(
                pre_norm=nn.LayerNorm(config.hidden_size),
                flatten=nn.Flatten(),
                linear_1=nn.Linear(merged, merged),
                gelu=nn.GELU(),
                linear_2=nn.Linear(merged, config.text_hidden_size),
            )
        )

    def forward(
        self,
        pixel_values: Tensor,
        cu_seqlens: Tensor,
        *,
        position_ids: Tensor,
        interp_indices: Tensor,
        interp_weights: Tensor,
        merge_permutation: Tensor,
    ) -> Tensor:
        """The embeddings of a batch of images.

        Args:
            pixel_values: (patches, 3, patch_size, patch_size), every image in raster order.
            cu_seqlens: (images + 1,) int32 cumulative patches.
            position_ids: (patches, 2), row and column.
            interp_indices, interp_weights: (patches, 16), taps as of `towers.grid.table_metadata`.
            merge_permutation: (patches,), as of `towers.grid.merge_permutation`.

        Returns:
            (output tokens, text_hidden_size), image by image, in raster order.
        """
        hidden = self.vision_tower["patch_embed"](pixel_values, interp_indices, interp_weights)
        rotary = _rotary(position_ids, self.config.hidden_size // self.config.num_attention_heads)
        encoder = self.vision_tower["encoder"]
        for block in encoder["blocks"]:
            hidden = block(hidden, rotary, cu_seqlens)
        hidden = encoder["final_layernorm"](hidden)
        height, width = self.config.merge_kernel_size
        result: Tensor = self.multi_modal_projector(merge(hidden, merge_permutation, height * width))
        return result


def _rotary(position_ids: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (patches, head_dim / 2): for each frequency the column's, then the row's."""
    steps = torch.arange(0, head_dim, 4, dtype=torch.float32, device=position_ids.device)
    frequencies = 1.0 / _ROTARY_BASE ** (steps / head_dim)
    rows, columns = position_ids.float().unbind(1)
    angles = torch.stack([columns[:, None] * frequencies, rows[:, None] * frequencies], dim=-1).flatten(1)
    return angles.cos(), angles.sin()

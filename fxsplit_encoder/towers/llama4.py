"""Llama 4's vision tower with its projector, its rotary embedding in real numbers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsplit_encoder._torch.transformers import llama4_angles
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers.grid import rotate_pairs
from fxsplit_encoder.towers.inputs import integer_rows, number_of, pixel_parts
from fxsplit_encoder.towers.tiles import DenseTower


class Llama4Tower(DenseTower):
    """Wraps what surrounds the language model in `Llama4ForConditionalGeneration`, called as its
    `get_image_features`, or the bare `Llama4VisionModel`. An embedding is (144 * tiles, text hidden size)
    with 336 x 336 tiles, projected; a bare tower's is not projected.
    """

    count_keys: ClassVar[tuple[str, ...]] = ("num_patches", "image_num_patches", "patches_per_image")

    def __init__(self, model: nn.Module) -> None:
        tower: Any = getattr(model, "vision_model", model)
        projector: Any = getattr(model, "multi_modal_projector", None)
        config = tower.config
        side = config.image_size // config.patch_size
        super().__init__(
            tower,
            tile_shape=(config.num_channels, config.image_size, config.image_size),
            tokens_per_tile=int(side**2 * config.pixel_shuffle_ratio**2),
            out_hidden_size=config.projector_output_dim
            if projector is None
            else projector.linear_1.out_features,
            children=None
            if projector is None
            else {"vision_model": tower, "multi_modal_projector": projector},
        )
        self.projects = projector is not None
        _use_real_rotary(tower)

    def features(self, tiles: Tensor) -> Tensor:
        """The projected features."""
        features: Tensor = self.tower(tiles, return_dict=True).last_hidden_state
        return self.multi_modal_projector(features) if self.projects else features

    def image_counts(self, mm_kwargs: dict[str, Any]) -> Any:
        """The tiles of every image, else by its `aspect_ratios` (rows, columns), one more for several."""
        counts, ratios = super().image_counts(mm_kwargs), mm_kwargs.get("aspect_ratios")
        if counts is not None or ratios is None:
            return counts
        total = sum(part.shape[0] for part in pixel_parts(mm_kwargs.get(self.input_name), self.input_name))
        if number_of(ratios) > total:
            raise InputError(
                f"aspect_ratios: expected one per image; got {number_of(ratios)} for {total} tiles"
            )
        listed = integer_rows(ratios, "aspect_ratios", 2, "rows of two integers (rows, columns of tiles)")
        return [rows * columns + (rows * columns > 1) for rows, columns in listed]


def _use_real_rotary(tower: Any) -> None:
    """Replaces rotary embedding and attention by ones without complex numbers, for Inductor."""
    if isinstance(tower.rotary_embedding, _RealRotaryEmbedding):
        return
    tower.rotary_embedding = _RealRotaryEmbedding(tower.rotary_embedding, tower.device)
    for layer in tower.model.layers:
        layer.self_attn = _RealAttention(layer.self_attn)


class _RealRotaryEmbedding(nn.Module):
    """Cosines and sines of every patch's angles, (2, patches, 1, head_dim / 2)."""

    def __init__(self, rotary_embedding: Any, device: torch.device) -> None:
        super().__init__()
        # Computed again, in float32: a cast of the tower casts its buffer too, and drops the imaginary part.
        angles = llama4_angles(rotary_embedding)
        table = torch.stack([angles.real, angles.imag]).to(device)
        self.register_buffer("table", table, persistent=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        table = self.table
        assert isinstance(table, torch.Tensor)
        return table


class _RealAttention(nn.Module):
    """`Llama4VisionAttention` with its own projections. Neighboring pairs of a head are rotated."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.head_dim = attention.head_dim
        self.q_proj = attention.q_proj
        self.k_proj = attention.k_proj
        self.v_proj = attention.v_proj
        self.o_proj = attention.o_proj

    def forward(
        self, hidden_states: Tensor, freqs_ci: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        projected = [proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (x.view(*x.shape[:-1], -1, self.head_dim) for x in projected)
        cos, sin = freqs_ci.unbind(0)
        q, k = rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o_proj(attended.transpose(1, 2).flatten(2)), None

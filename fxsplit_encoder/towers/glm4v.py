"""GLM-4.1V's, 4.5V's and 4.6V's vision tower: a resampled position table, patches merged by convolution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.grid import Grid, cosines_and_sines, gives_angles, resample
from fxsplit_encoder.towers.packed import PackedTower


class Glm4vTower(PackedTower):
    """Wraps `Glm4vVisionModel` and `Glm4vMoeVisionModel`. A video may also be one grid of several frames."""

    has_plain_blocks = True
    frames_are_independent = True
    metadata_columns: Mapping[str, tuple[int, torch.dtype]] = grids_of.table_columns("bicubic")
    # Their processor takes 2 frames per second of at most 300 seconds, and merges them in pairs.
    max_frames_per_video: int = 300

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        super().__init__(tower, out_hidden_size=config.out_hidden_size, **grids_of.patch_sizes(config))
        side = config.image_size // config.patch_size
        self.table_shape = (side, side)
        self.from_angles = gives_angles(self.tower.rotary_pos_emb)

    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Positions for the rotary embedding, and taps into the learned position table."""
        return grids_of.table_metadata(
            grids, self.table_shape, self.merge_size, align_corners=False, mode="bicubic"
        )

    def core(
        self, pixel_values: Tensor, cu_seqlens: Tensor, metadata: dict[str, Tensor]
    ) -> BaseModelOutputWithPooling:
        """The tower's forward with its position table sampled by taps."""
        tower: Any = self.tower
        hidden: Any = tower.post_conv_layernorm(tower.patch_embed(pixel_values))
        rotary = cosines_and_sines(
            tower.rotary_pos_emb, hidden, metadata["position_ids"], from_angles=self.from_angles
        )
        table: Tensor = tower.embeddings.position_embedding.weight
        # Resampled rows are summed in float32, as the tower itself does.
        positions = resample(table, metadata["interp_indices"], metadata["interp_weights"])
        hidden = hidden + positions.to(table.dtype)
        for block in tower.blocks:
            hidden = block(
                hidden,
                cu_seqlens=cu_seqlens,
                max_seqlen=pixel_values.shape[0],
                position_embeddings=rotary,
            )
        hidden = self._downsample(tower.post_layernorm(hidden))
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=tower.merger(hidden))

    def _downsample(self, hidden: Tensor) -> Tensor:
        """(tokens, out_hidden_size): the tower's convolution over a token's patches, as a matrix product."""
        convolution: Any = self.tower.downsample
        width = hidden.shape[-1]
        # In two steps: so a trace knows every size but the first.
        groups = hidden.view(-1, self.rows_per_token * width).view(-1, self.rows_per_token, width)
        channels_first = groups.transpose(1, 2).flatten(1)
        return F.linear(channels_first, convolution.weight.flatten(1), convolution.bias)

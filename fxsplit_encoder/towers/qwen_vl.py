"""The vision towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, and of GLM-4.1V, 4.5V and 4.6V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from fxsplit_encoder.compile.rewriting import permute_rows
from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.grid import Grid, cosines_and_sines, gives_angles, resample
from fxsplit_encoder.towers.packed import PackedTower


class Qwen2VLTower(PackedTower):
    """Wraps `Qwen2VisionTransformerPretrainedModel`: rotary positions only, and attention within frames."""

    has_plain_blocks = True
    frames_are_independent = True
    metadata_columns: Mapping[str, tuple[int, torch.dtype]] = {"position_ids": (2, torch.int64)}

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        # `embed_dim` is the width of its blocks.
        super().__init__(tower, out_hidden_size=config.hidden_size, **grids_of.patch_sizes(config))

    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Positions for the rotary embedding."""
        return {"position_ids": grids_of.positions(grids, self.merge_size)}


class Qwen25VLTower(PackedTower):
    """Wraps `Qwen2_5_VisionTransformerPretrainedModel`, most of whose blocks attend within windows. The
    permutation to the order of windows, its inverse and permuted rotary positions are per-patch metadata of
    the host, so that all lengths follow from one token count.
    """

    has_plain_blocks = True
    frames_are_independent = True
    metadata_columns: Mapping[str, tuple[int, torch.dtype]] = {
        "position_ids": (2, torch.int64),
        "window_permutation": (0, torch.int64),
        "inverse_permutation": (0, torch.int64),
    }
    # A frame of n tokens has between n / 16 and (n + 3) / 4 windows of 4 x 4, and little more than n / 16
    # unless it is very narrow. With 4 for each typical frame of 32 tokens, a budget holds twice the windows
    # of frames that they tile; every empty one costs attention.
    segment_inputs: ClassVar[dict[str, int]] = {"cu_window_seqlens": 4, "cu_seqlens": 1}

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        super().__init__(tower, out_hidden_size=config.out_hidden_size, **grids_of.patch_sizes(config))
        self.window: int = config.window_size // config.patch_size // config.spatial_merge_size
        """Output tokens along a window's side."""
        self.full_attention = frozenset(config.fullatt_block_indexes)
        self.from_angles = gives_angles(self.tower.rotary_pos_emb)

    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Rotary positions in the order of windows, the permutation into that order, and its inverse."""
        permutation = grids_of.window_permutation(grids, self.merge_size, self.window)
        order = permutation.numpy()  # NumPy works in this thread alone, see `_torch.staging`
        inverse = np.empty_like(order)
        inverse[order] = np.arange(order.shape[0])
        return {
            "position_ids": torch.from_numpy(grids_of.positions(grids, self.merge_size).numpy()[order]),
            "window_permutation": permutation,
            "inverse_permutation": torch.from_numpy(inverse),
        }

    def segment_lengths(self, grids: Sequence[Grid]) -> dict[str, list[int]]:
        """The patches of every window and of every frame."""
        windows = grids_of.window_lengths(grids, self.merge_size, self.window)
        return {"cu_window_seqlens": windows, **super().segment_lengths(grids)}

    def num_segments(self, grid: Grid) -> dict[str, int]:
        """The windows and the frames of an item."""
        frames, *sides = grid
        rows, columns = (-(-side // self.merge_size // self.window) for side in sides)
        return {"cu_window_seqlens": frames * rows * columns, "cu_seqlens": frames}

    def core(
        self, pixel_values: Tensor, cu_seqlens: Tensor, metadata: dict[str, Tensor]
    ) -> BaseModelOutputWithPooling:
        """The tower's forward with the host's permutations. Patches return to their order before the merger,
        which joins the same neighbors either way, so that every row is a token.
        """
        tower: Any = self.tower
        hidden = permute_rows(tower.patch_embed(pixel_values), metadata["window_permutation"])
        rotary = cosines_and_sines(
            tower.rotary_pos_emb, hidden, metadata["position_ids"], from_angles=self.from_angles
        )
        frames = {"cu_seqlens": cu_seqlens, "max_seqlen": pixel_values.shape[0]}
        windows = {
            "cu_seqlens": metadata["cu_window_seqlens"],
            "max_seqlen": self.window**2 * self.rows_per_token,
        }
        for number, block in enumerate(tower.blocks):
            segments = frames if number in self.full_attention else windows
            hidden = block(hidden, position_embeddings=rotary, **segments)
        merged = tower.merger(permute_rows(hidden, metadata["inverse_permutation"]))
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=merged)


class Qwen3VLTower(PackedTower):
    """Wraps the towers of Qwen3-VL and, without deepstack, of Qwen3.5. An embedding is (output tokens,
    out_hidden_size * (1 + deepstack levels)): the main output, then every level.
    """

    has_plain_blocks = True
    frames_are_independent = True
    metadata_columns: Mapping[str, tuple[int, torch.dtype]] = grids_of.table_columns("bilinear")

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        levels = 1 + len(getattr(config, "deepstack_visual_indexes", ()))
        super().__init__(
            tower, out_hidden_size=config.out_hidden_size * levels, **grids_of.patch_sizes(config)
        )
        self.deepstack_levels = levels - 1
        side: Any = tower.num_grid_per_side
        self.table_shape: tuple[int, int] = (side, side)
        self.align_corners: bool = tower.interpolation_align_corners  # type: ignore[assignment]

    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Positions for the rotary embedding, and taps into the learned position table."""
        return grids_of.table_metadata(
            grids, self.table_shape, self.merge_size, self.align_corners, mode="bilinear"
        )

    def packed_output(self, output: Any) -> Tensor:
        """The main output, then every deepstack level, along the hidden dimension."""
        if not self.deepstack_levels:
            return super().packed_output(output)
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)


class Glm4vTower(PackedTower):
    """Wraps `Glm4vVisionModel` and `Glm4vMoeVisionModel`: a resampled position table, patches merged by
    convolution. A video may also be one grid of several frames."""

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
                hidden, cu_seqlens=cu_seqlens, max_seqlen=pixel_values.shape[0], position_embeddings=rotary
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

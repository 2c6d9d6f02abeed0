"""Kimi-K2.5's vision tower: MoonViT over images and over clips of a few frames, each pooled into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.modules.blocks import merge, resample
from fxsplit_encoder.protocol import EncoderItemSpec
from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.base import given_batch
from fxsplit_encoder.towers.grid import Grid
from fxsplit_encoder.towers.merge import mean_frames
from fxsplit_encoder.towers.raster import RasterTower


class KimiK25Tower(RasterTower):
    """Wraps `Kimi_K25VisionModel`.

    All frames of a clip attend to one another and then become one frame, their mean. Until then they are
    rows like any others, so budgets count the tokens of every frame; the mean is taken behind the replay,
    clip by clip. Clips of different lengths may share a batch, which the wrapped tower alone refuses.

    An item's embedding is the tower's pooled output, flattened: (output tokens, merge area * hidden_size).
    """

    metadata_columns: ClassVar[dict[str, tuple[int, torch.dtype]]] = {
        **RasterTower.metadata_columns,
        "frame_index": (0, torch.int64),
    }
    input_names: ClassVar[tuple[str, str]] = ("pixel_values", "grid_thw")
    takes_options: ClassVar[bool] = False

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        super().__init__(
            tower,
            merge_kernel=config.merge_kernel_size,
            patch_size=config.patch_size,
            table_shape=(config.pos_emb_height, config.pos_emb_width),
            out_hidden_size=config.merge_kernel_size[0] * config.merge_kernel_size[1] * config.hidden_size,
        )
        self.max_frames_per_video = config.pos_emb_time
        # Before transformers 5.17 the rotary embedding takes (2, patches), columns first.
        self.transposes_positions = not hasattr(tower.rotary_emb, "recomposition_frequencies")
        self.register_forward_hook(_pool_frames, with_kwargs=True)

    def read_grids(self, grids: Any, name: str) -> list[Grid]:
        """The grids of images and clips; raises InputError for a clip longer than the table of times."""
        result = super().read_grids(grids, name)
        for frames, height, width in result:
            if frames > self.max_frames_per_video:
                raise InputError(
                    f"{name}: expected at most {self.max_frames_per_video} frames a clip; got "
                    f"{(frames, height, width)}; cut videos into such clips, as the video processor does"
                )
        return result

    def segment_lengths(self, grids: Sequence[Grid]) -> dict[str, list[int]]:
        """The patches of every image or clip."""
        return {"cu_seqlens": [t * h * w for t, h, w in grids]}

    def num_segments(self, grid: Grid) -> dict[str, int]:
        """One: the frames of a clip attend to one another."""
        return {"cu_seqlens": 1}

    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """What every raster tower has, and each patch's row of the time table, which is zero for images."""
        frames = np.array([frame + (t > 1) for t, _, _ in grids for frame in range(t)], np.int64)
        index = torch.from_numpy(np.repeat(frames, grids_of.frame_lengths(grids)))
        return {**super().metadata(grids), "frame_index": index}

    def core(
        self, pixel_values: Tensor, cu_seqlens: Tensor, metadata: dict[str, Tensor], **kwargs: Any
    ) -> Any:
        """The tower's forward past its own host metadata; the pooled output still has all frames' tokens."""
        tower: Any = self.tower
        positions = tower.patch_embed.pos_emb
        table = positions.position_embeddings.flatten(0, 1)
        pos = resample(table, metadata["interp_indices"], metadata["interp_weights"])
        pos = pos + F.embedding(metadata["frame_index"], positions.time_position_embeddings)
        hidden = tower.patch_embed.proj(self.as_images(pixel_values)).flatten(1)
        hidden = hidden + pos.to(hidden.dtype)
        position_ids = metadata["position_ids"]
        if self.transposes_positions:
            position_ids = position_ids.transpose(0, 1).flip(0)
        rotary = tower.rotary_emb(hidden, position_ids)
        for layer in tower.layers:
            # The patch count bounds every segment, whatever the batch.
            hidden = layer(
                hidden, cu_seqlens=cu_seqlens, max_seqlen=hidden.shape[0], position_embeddings=rotary
            )
        hidden = tower.final_layernorm(hidden)
        return BaseModelOutputWithPooling(
            last_hidden_state=hidden,
            pooler_output=merge(  # type: ignore[arg-type]
                hidden, metadata["merge_order"], self.rows_per_token
            ),
        )

    def packed_output(self, output: Any) -> Tensor:
        """The tokens of every frame, flattened."""
        tokens: Tensor = output.pooler_output.flatten(1)
        return tokens

    def item_spec(self, grid: Grid) -> EncoderItemSpec:
        """The patches and output tokens of an item; on the path, each frame's tokens count."""
        t, h, w = grid
        tokens = h * w // self.rows_per_token
        return EncoderItemSpec(t * h * w, tokens, {"default": t * tokens})

    def postprocess_encoder_output(
        self,
        outputs: dict[str, Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: dict[int, Tensor] | list[Tensor | None],
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Hands every item its rows of the output, the mean over its frames.

        Raises:
            InputError: without `batch_mm_kwargs`, which say how many frames an item has.
        """
        grids = self.item_grids(given_batch(batch_mm_kwargs))
        pooled = mean_frames(outputs["default"], grids, self.rows_per_token)
        for index, embedding in zip(indices, pooled, strict=True):
            dest[index] = embedding.clone() if clone else embedding


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _pool_frames(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Takes the means over frames that `core` left. It runs outside of the compiled frame: how many rows are
    left depends on the grids, which no graph may.
    """
    assert isinstance(module, KimiK25Tower)
    _, grid_thw = module.own_inputs(args, kwargs)
    grids = module.read_grids(grid_thw, "grid_thw")
    frame_tokens = grids_of.count_patches(grids) // module.rows_per_token
    # The wrapped tower's own forward has pooled by itself.
    tokens: Any = getattr(output, "pooler_output", None)
    if tokens is not None and tokens.shape[0] == frame_tokens:
        output.pooler_output = torch.cat(mean_frames(tokens, grids, module.rows_per_token))

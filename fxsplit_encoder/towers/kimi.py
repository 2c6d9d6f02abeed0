"""The vision towers of Kimi-VL and Kimi-K2.5: MoonViT, whose patches come in raster order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from fxsplit_encoder.errors import InputError, UnsupportedTowerError
from fxsplit_encoder.messages import names_of
from fxsplit_encoder.protocol import EncoderItemSpec
from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.grid import Grid, merge, resample
from fxsplit_encoder.towers.inputs import integer_rows
from fxsplit_encoder.towers.packed import PackedTower


class RasterTower(PackedTower):
    """The base of adapters whose patches are (patches, 3, patch_size, patch_size) in raster order: rows are
    permuted after the last block, so that those of an output token follow one another.
    """

    has_plain_blocks = True
    metadata_columns: Mapping[str, tuple[int, torch.dtype]] = {
        **grids_of.table_columns("bicubic"),
        "merge_permutation": (0, torch.int64),
    }

    def __init__(self, tower: nn.Module, table_shape: tuple[int, int], out_hidden_size: int) -> None:
        config: Any = tower.config
        height, width = config.merge_kernel_size
        patch_size = config.patch_size
        if height != width:
            raise UnsupportedTowerError(
                f"{type(tower).__name__}: merge_kernel_size: expected a square; got {height} x {width}"
            )
        super().__init__(
            tower, merge_size=height, patch_features=3 * patch_size**2, out_hidden_size=out_hidden_size
        )
        self.patch_view = (-1, 3, patch_size, patch_size)
        self.table_shape = table_shape

    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Positions for the rotary embedding, taps into the learned position table, and the merge order."""
        table = grids_of.table_metadata(
            grids, self.table_shape, merge_size=1, align_corners=False, mode="bicubic"
        )
        return {**table, "merge_permutation": grids_of.merge_permutation(grids, self.merge_size)}


class KimiVLTower(RasterTower):
    """Wraps `KimiVLVisionModel`; `image_grid_hws` are (images, 2), embeddings (tokens, text_hidden_size)."""

    input_names: Sequence[str] = ("pixel_values", "image_grid_hws")
    input_keys: ClassVar[tuple[tuple[str, str], ...]] = (("pixel_values", "image_grid_hws"),)
    modalities: Sequence[str] = ("image",)
    max_frames_per_video: int = 1

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        super().__init__(
            tower, (config.init_pos_emb_height, config.init_pos_emb_width), config.text_hidden_size
        )

    def read_grids(self, grids: Any, name: str) -> list[Grid]:
        """Images as grids of one frame, from (images, 2) heights and widths."""
        rows = integer_rows(grids, name, 2, "rows of two integers (height, width) in patches")
        return grids_of.read_grids([(1, *row) for row in rows], self.merge_size, name)

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The batch of some images, in the order of `indices`."""
        selected = super().select_encoder_cudagraph_items(mm_kwargs, indices)
        sizes = [(height, width) for _, height, width in selected.get("image_grid_hws", ())]
        return {**selected, "image_grid_hws": sizes} if sizes else selected

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        """Patches and the size of one image of the smallest budget's size."""
        patches, grid = super().example_inputs()
        return patches, grid[:, 1:]

    def core(self, pixel_values: Tensor, cu_seqlens: Tensor, metadata: dict[str, Tensor]) -> Tensor:
        """The tower and its projector past the host metadata."""
        result: Tensor = self.tower(self.viewed(pixel_values), cu_seqlens, **metadata)
        return result

    def packed_output(self, output: Tensor) -> Tensor:
        """The embeddings as they are."""
        return output

    def call_tower(self, *args: Any, **kwargs: Any) -> Any:
        """Raises InputError: the tower returns embeddings, and takes no options."""
        names = ", ".join(self.input_names)
        raise InputError(f"forward: expected {names} and no options; got {names_of(kwargs)}; leave them out")


class KimiK25Tower(RasterTower):
    """Wraps `Kimi_K25VisionModel`. All frames of a clip attend to one another; their mean is taken after the
    replay, and budgets count the tokens of every frame. An embedding is the pooled output, flattened: (output
    tokens, merge area * hidden_size).
    """

    metadata_columns: Mapping[str, tuple[int, torch.dtype]] = {
        **RasterTower.metadata_columns,
        "frame_index": (0, torch.int64),
    }
    input_names: Sequence[str] = ("pixel_values", "grid_thw")
    assembles = True
    items_are_segments = True

    def __init__(self, tower: nn.Module) -> None:
        config: Any = tower.config
        merged = config.merge_kernel_size[0] * config.merge_kernel_size[1]
        super().__init__(tower, (config.pos_emb_height, config.pos_emb_width), merged * config.hidden_size)
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
                    f"{name}: expected at most {self.max_frames_per_video} frames per clip; got "
                    f"{(frames, height, width)}; cut videos into such clips, as the video processor does"
                )
        return result

    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Adds each patch's row of the time table, which is zero for images."""
        frames = np.array([frame + (t > 1) for t, _, _ in grids for frame in range(t)], np.int64)
        index = torch.from_numpy(np.repeat(frames, grids_of.frame_lengths(grids)))
        return {**super().metadata(grids), "frame_index": index}

    def core(self, pixel_values: Tensor, cu_seqlens: Tensor, metadata: dict[str, Tensor]) -> Any:
        """The tower's forward past its own host metadata; the pooled output still has all frames' tokens."""
        tower: Any = self.tower
        positions = tower.patch_embed.pos_emb
        table = positions.position_embeddings.flatten(0, 1)
        pos = resample(table, metadata["interp_indices"], metadata["interp_weights"])
        pos = pos + F.embedding(metadata["frame_index"], positions.time_position_embeddings)
        hidden = tower.patch_embed.proj(self.viewed(pixel_values)).flatten(1)
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
            pooler_output=merge(hidden, metadata["merge_permutation"], self.rows_per_token),
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

    def assembled(self, outputs: dict[str, Tensor], mm_kwargs: dict[str, Any], clone: bool) -> list[Tensor]:
        """The mean of every item's rows over its frames."""
        pooled = mean_frames(outputs["default"], self.item_grids(mm_kwargs), self.rows_per_token)
        return [rows.clone() for rows in pooled] if clone else pooled


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _pool_frames(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Takes the means over frames outside the compiled frame: the number of rows depends on the grids."""
    assert isinstance(module, KimiK25Tower)
    _, grid_thw = module.own_inputs(args, kwargs)
    grids = module.read_grids(grid_thw, "grid_thw")
    frame_tokens = grids_of.count_patches(grids) // module.rows_per_token
    # The wrapped tower's own forward has pooled by itself.
    tokens: Any = getattr(output, "pooler_output", None)
    if tokens is not None and tokens.shape[0] == frame_tokens:
        output.pooler_output = torch.cat(mean_frames(tokens, grids, module.rows_per_token))


def mean_frames(tokens: Tensor, grids: Sequence[Grid], rows_per_token: int) -> list[Tensor]:
    """Output tokens of every item from (tokens of all frames, ...): views of images, means of clips."""
    counts = [t * h * w // rows_per_token for t, h, w in grids]
    items = torch.split(tokens[: sum(counts)], counts)
    return [
        item.view(t, -1, *item.shape[1:]).mean(0) if t > 1 else item
        for item, (t, _, _) in zip(items, grids, strict=True)
    ]

"""Towers that encode a packed sequence of patches described by a grid: the common part of their adapters.

`mm_kwargs` are what Hugging Face's processors make: `pixel_values` (patches, features) with `image_grid_thw`
(images, 3), and `pixel_values_videos` with `video_grid_thw`. Items are the images in order, then the videos.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from fxsplit_encoder.attention.hugging_face import use_varlen_attention
from fxsplit_encoder.capture.segments import cover_pad_rows, segment_capacity
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager.protocol import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    scatter_output_slices,
)
from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.metadata_op import register_tower, vision_metadata

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from fxsplit_encoder.towers.grid import Grid

# Metadata that a caller may compute itself, for the tower's own forward.
_PRECOMPUTED = ("cu_seqlens", "position_ids", "interp_indices", "interp_weights", "max_seqlen")
_INPUT_KEYS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))


class PackedTower(nn.Module):
    """A Hugging Face tower behind the manager's protocol, and still a module with the tower's own forward.

    An adapter gives `metadata_columns`, `metadata`, `core`, and the numbers below.
    """

    supports_encoder_cudagraph: ClassVar[Literal[True]] = True
    metadata_columns: ClassVar[dict[str, tuple[int, torch.dtype]]]
    """Name, columns and dtype of every per-patch metadata tensor."""
    max_frames_per_video: ClassVar[int] = 384
    """Grid frames of the longest video: 768 frames, which the processors merge in pairs."""
    min_item_tokens: ClassVar[int] = 64
    """The smallest item worth a budget of its own: 256 x 256 pixels."""
    max_budget: ClassVar[int] = 4096
    """The largest batch worth capturing; on one H200 the exact shape is as fast from about 800 tokens on."""

    def __init__(
        self, tower: nn.Module, *, merge_size: int, patch_features: int, out_hidden_size: int
    ) -> None:
        super().__init__()
        self.tower = tower
        self.merge_size = merge_size
        self.rows_per_token: int = merge_size**2
        self.patch_features = patch_features
        self.out_hidden_size = out_hidden_size
        use_varlen_attention(tower)
        self.registered_name = register_tower(self)
        self.register_forward_pre_hook(_mark_dynamic, with_kwargs=True)

    # --- what an adapter gives

    @abstractmethod
    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """The per-patch metadata of a batch, on the CPU: a tensor of (patches, columns) for each of
        `metadata_columns`.
        """

    @abstractmethod
    def core(
        self, pixel_values: Tensor, cu_seqlens: Tensor, metadata: dict[str, Tensor], **kwargs: Any
    ) -> Any:
        """The tower's forward on fixed-shape tensors, with the tower's own options and output type."""

    @abstractmethod
    def packed_output(self, output: Any) -> Tensor:
        """(output tokens, out_hidden_size) from the tower's own output type."""

    # --- the module

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        """The tower's forward: patches (patches, features), grids (items, 3), its own options and output.

        Raises:
            InputError: the grids do not describe the patches.
        """
        if any(name in _PRECOMPUTED for name in kwargs):
            return self.tower(hidden_states, grid_thw, **kwargs)
        *per_patch, cu_seqlens = vision_metadata(hidden_states, grid_thw, self.registered_name)
        metadata = dict(zip(self.metadata_columns, per_patch, strict=True))
        return self.core(hidden_states, cu_seqlens, metadata, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the model around a tower asks of it (`config`, `spatial_merge_size`) is the tower's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "tower":
                raise
            return getattr(self.tower, name)

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        """Patches and the grid of one image of the smallest budget's size."""
        rows = self.min_item_tokens * self.rows_per_token
        patches = torch.randn(rows, self.patch_features, device=self.device, dtype=self.dtype)
        return patches, torch.tensor([[1, self.merge_size, rows // self.merge_size]])

    @property
    def device(self) -> torch.device:
        """The device of the tower's parameters."""
        return next(self.tower.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tower's parameters."""
        return next(self.tower.parameters()).dtype

    # --- the manager's protocol

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """What a capture of this tower needs."""
        return EncoderCudaGraphConfig(
            modalities=["image", "video"],
            buffer_keys=["pixel_values", *self.metadata_columns, "cu_seqlens"],
            out_hidden_size=self.out_hidden_size,
            padding_logics={"cu_seqlens": cover_pad_rows},
            max_frames_per_video=self.max_frames_per_video,
        )

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        """ "video" if there are videos, else "image"."""
        return "video" if mm_kwargs.get("video_grid_thw") is not None else "image"

    def get_max_frames_per_video(self) -> int:
        """The most frames that one video may have."""
        return self.max_frames_per_video

    def get_encoder_cudagraph_budget_range(self, vllm_config: Any) -> tuple[int, int]:
        """The smallest and the largest useful budget, in output tokens."""
        return self.min_item_tokens, self.max_budget

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """The patches and output tokens of every item."""
        return [
            EncoderItemSpec(input_size=t * h * w, output_tokens=t * h * w // self.rows_per_token)
            for t, h, w in self.item_grids(mm_kwargs)
        ]

    def item_segments(self, mm_kwargs: dict[str, Any]) -> list[int]:
        """The attention segments of every item: its frames."""
        return [t for t, _, _ in self.item_grids(mm_kwargs)]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The batch of some items, in the order of `indices`."""
        grids = self.item_grids(mm_kwargs)
        pixels = self._pixels(mm_kwargs)
        starts = grids_of.cumulative_lengths([t * h * w for t, h, w in grids]).tolist()
        return {"pixel_values": pixels.rows(starts, indices), "image_grid_thw": [grids[i] for i in indices]}

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: tuple[Hashable, ...] | None = None,
    ) -> EncoderCudaGraphCaptureInputs:
        """Tensors that fill a budget, with contents that the forward can run on."""
        rows = token_budget * self.rows_per_token
        dummy: list[Grid] = [(1, self.merge_size, rows // self.merge_size)]
        segments = segment_capacity(token_budget, max_batch_size + max_frames_per_batch)
        cu_seqlens = torch.full((segments + 2,), rows, dtype=torch.int32)
        cu_seqlens[0] = 0
        values = {"pixel_values": torch.randn(rows, self.patch_features), **self.metadata(dummy)}
        moved = {name: value.to(device=device) for name, value in values.items()}
        moved["pixel_values"] = moved["pixel_values"].to(dtype)
        return EncoderCudaGraphCaptureInputs({**moved, "cu_seqlens": cu_seqlens.to(device)})

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> EncoderCudaGraphReplayBuffers:
        """The batch's tensors at their true sizes; metadata on the CPU."""
        grids = self.item_grids(mm_kwargs)
        cu_seqlens = torch.from_numpy(grids_of.cumulative_lengths(grids_of.frame_lengths(grids)))
        pixels = self._pixels(mm_kwargs).all()
        return EncoderCudaGraphReplayBuffers(
            {"pixel_values": pixels, **self.metadata(grids), "cu_seqlens": cu_seqlens}
        )

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        """The forward on prepared tensors: what is traced and captured."""
        metadata = {name: inputs[name] for name in self.metadata_columns}
        return self.packed_output(self.core(inputs["pixel_values"], inputs["cu_seqlens"], metadata))

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        """The same features without a capture."""
        buffers = self.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, 0, 0)
        inputs = {name: value.to(self.device) for name, value in buffers.values.items() if value is not None}
        return self.encoder_cudagraph_forward(inputs)

    def postprocess_encoder_output(
        self,
        outputs: dict[str, Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: dict[int, Tensor] | list[Tensor | None],
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Hands every item its rows of the output."""
        scatter_output_slices(outputs["default"], indices, per_item_out_tokens, dest, clone)

    # --- inputs

    def item_grids(self, mm_kwargs: dict[str, Any]) -> list[Grid]:
        """The grids of a batch: the images', then the videos'."""
        return [
            grid
            for _, key in _INPUT_KEYS
            if mm_kwargs.get(key) is not None
            for grid in grids_of.read_grids(mm_kwargs[key], self.merge_size, key)
        ]

    def _pixels(self, mm_kwargs: dict[str, Any]) -> _Patches:
        tensors = []
        for key, grid_key in _INPUT_KEYS:
            tensor, grid = mm_kwargs.get(key), mm_kwargs.get(grid_key)
            if tensor is not None and (tensor.dim() != 2 or tensor.shape[1] != self.patch_features):
                raise InputError(
                    f"{key}: expected (patches, {self.patch_features}); got {tuple(tensor.shape)}; "
                    "pass the flattened patches that the tower's image processor makes"
                )
            rows = 0 if tensor is None else tensor.shape[0]
            grids = [] if grid is None else grids_of.read_grids(grid, self.merge_size, grid_key)
            expected = grids_of.count_patches(grids)
            if rows != expected:
                raise InputError(f"{key}: {grid_key} describes {expected} patches; got {rows} rows")
            if tensor is not None:
                tensors.append(tensor)
        return _Patches(tensors, self.patch_features)


class _Patches:
    """The rows of one or two pixel tensors, seen as one sequence."""

    def __init__(self, tensors: list[Tensor], features: int) -> None:
        self.tensors = tensors or [torch.zeros(0, features)]

    def rows(self, starts: list[int], items: list[int]) -> Tensor:
        """The rows of some items; a view where they are neighbours."""
        spans: list[list[int]] = []
        for item in items:
            start, end = starts[item], starts[item + 1]
            if spans and spans[-1][1] == start:
                spans[-1][1] = end
            else:
                spans.append([start, end])
        return _join([part for start, end in spans for part in self._span(start, end)], self.tensors[0])

    def all(self) -> Tensor:
        return _join(self.tensors, self.tensors[0])

    def _span(self, start: int, end: int) -> list[Tensor]:
        parts = []
        offset = 0
        for tensor in self.tensors:
            first, last = max(start - offset, 0), min(end - offset, tensor.shape[0])
            if first < last:
                parts.append(tensor[first:last])
            offset += tensor.shape[0]
        return parts


def _join(parts: list[Tensor], like: Tensor) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else like[:0]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mark_dynamic(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Tells Dynamo, before it traces, that patches and items vary, so that one trace serves every batch.

    It runs outside of the compiled frame. The marks go on aliases: the caller's tensors stay as they are.
    """
    names = ("hidden_states", "grid_thw")
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    patches, grid = (values.get(name) for name in names)
    if not (isinstance(patches, torch.Tensor) and isinstance(grid, torch.Tensor)):
        return args, kwargs
    if patches.dim() == 2 and patches.shape[0] > 1:
        patches = patches.view_as(patches)
        torch._dynamo.mark_dynamic(patches, 0)
        torch._dynamo.mark_static(patches, 1)
    if grid.dim() == 2 and grid.shape[0] > 0:
        grid = grid.view_as(grid)
        # One image is a size like any other: a backed size of 1 would be specialised.
        torch._dynamo.decorators.mark_unbacked(grid, 0)
        torch._dynamo.mark_static(grid, 1)
    return (patches, grid), {k: v for k, v in kwargs.items() if k not in names}

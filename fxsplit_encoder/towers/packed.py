"""Towers that encode a packed sequence of patches described by a grid: the common part of their adapters.

`mm_kwargs` are what Hugging Face's processors make: `pixel_values` (patches, features) with `image_grid_thw`
(images, 3), and `pixel_values_videos` with `video_grid_thw`. Items are the images in order, then the videos.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from fxsplit_encoder.attention.hugging_face import use_varlen_attention
from fxsplit_encoder.capture.segments import cover_pad_rows, segment_capacity
from fxsplit_encoder.compile import to_device
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
_EMBEDDINGS = ("image_embeds", "video_embeds")

# Metadata that stays on the device: of so many batches of at most so many patches, 64 bytes each in Qwen3-VL,
# 16 MiB in all.
_KEPT_BATCHES = 64
_KEPT_PATCHES = 4096


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

    modalities: Sequence[str] = ("image", "video")
    """What captures serve. Leave "video" out where tokens of videos are pruned by their content, so that
    their number is not known before they are encoded; nothing is captured for them then."""

    def __init__(
        self, tower: nn.Module, *, merge_size: int, patch_features: int, out_hidden_size: int
    ) -> None:
        super().__init__()
        self.tower = tower
        self.merge_size = merge_size
        self.rows_per_token: int = merge_size**2
        self.patch_features = patch_features
        self.out_hidden_size = out_hidden_size
        self._first_parameters, self._first_name = _first_parameter(tower)
        self._device_metadata: dict[tuple[Grid, ...], dict[str, Tensor]] = {}
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
        # Walking the modules to the first parameter takes ten microseconds, so its place is kept.
        return self._first_parameters[self._first_name].device  # type: ignore[union-attr]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tower's parameters."""
        return next(self.tower.parameters()).dtype

    # --- the manager's protocol

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """What a capture of this tower needs."""
        return EncoderCudaGraphConfig(
            modalities=list(self.modalities),
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

    def item_modalities(self, mm_kwargs: dict[str, Any]) -> list[str]:
        """ "image" or "video" for every item."""
        images, videos = (0 if mm_kwargs.get(key) is None else len(mm_kwargs[key]) for _, key in _INPUT_KEYS)
        return ["image"] * images + ["video"] * videos

    def item_segments(self, mm_kwargs: dict[str, Any]) -> list[int]:
        """The attention segments of every item: its frames."""
        return [t for t, _, _ in self.item_grids(mm_kwargs)]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The batch of some items, in the order of `indices`."""
        grids = self.item_grids(mm_kwargs)
        starts = grids_of.cumulative_lengths([t * h * w for t, h, w in grids]).tolist()
        pixels, num_images = self._pixels(mm_kwargs), self.item_modalities(mm_kwargs).count("image")
        images = list(itertools.takewhile(lambda index: index < num_images, indices))
        videos = indices[len(images) :]
        if min(videos, default=num_images) < num_images:
            images, videos = (
                indices,
                [],
            )  # in an order that the keys cannot tell; a video is an image of frames
        selected: dict[str, Any] = {}
        for items, (key, grid_key) in zip((images, videos), _INPUT_KEYS, strict=True):
            if items:
                selected[key] = _one_or_several(_parts(pixels, starts, items))
                selected[grid_key] = [grids[index] for index in items]
        return selected

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
        pixels = torch.randn(rows, self.patch_features, device=device, dtype=dtype)
        metadata = {name: value.to(device=device) for name, value in self.metadata(dummy).items()}
        return EncoderCudaGraphCaptureInputs(
            {"pixel_values": pixels, **metadata, "cu_seqlens": cu_seqlens.to(device)}
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> EncoderCudaGraphReplayBuffers:
        """The batch's tensors at their true sizes; metadata on the CPU."""
        grids = tuple(self.item_grids(mm_kwargs))
        cu_seqlens = torch.from_numpy(grids_of.cumulative_lengths(grids_of.frame_lengths(grids)))
        return EncoderCudaGraphReplayBuffers(
            {
                "pixel_values": _one_or_several(self._pixels(mm_kwargs)),
                **self._metadata(grids),
                "cu_seqlens": cu_seqlens,
            }
        )

    def _metadata(self, grids: tuple[Grid, ...]) -> dict[str, Tensor]:
        """The metadata of a batch; on the device if it is small and its sizes have come before, so that a
        replay need not bring it there again.
        """
        if not self.device.type == "cuda" or grids_of.count_patches(grids) > _KEPT_PATCHES:
            return self.metadata(grids)
        kept = self._device_metadata.pop(grids, None)
        if kept is None or next(iter(kept.values())).device != self.device:
            kept = {name: to_device(value, self.device) for name, value in self.metadata(grids).items()}
            if len(self._device_metadata) >= _KEPT_BATCHES:
                self._device_metadata.pop(next(iter(self._device_metadata)))
        self._device_metadata[grids] = kept  # the least recently used one is the first
        return kept

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        """The forward on prepared tensors: what is traced and captured."""
        metadata = {name: inputs[name] for name in self.metadata_columns}
        return self.packed_output(self.core(inputs["pixel_values"], inputs["cu_seqlens"], metadata))

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        """The same features without a capture."""
        buffers = self.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, 0, 0)
        inputs = {
            name: (value if isinstance(value, torch.Tensor) else torch.cat(list(value))).to(self.device)
            for name, value in buffers.values.items()
            if value is not None
        }
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
        """The grids of a batch: the images', then the videos'.

        Raises:
            InputError: a grid is not one of this tower, or the items are embeddings already.
        """
        for key in _EMBEDDINGS:
            if mm_kwargs.get(key) is not None:
                raise InputError(
                    f"{key}: these are embeddings already, expected pixels; leave them out and encode the "
                    "other items"
                )
        return [
            grid
            for _, key in _INPUT_KEYS
            if mm_kwargs.get(key) is not None
            for grid in grids_of.read_grids(mm_kwargs[key], self.merge_size, key)
        ]

    def _pixels(self, mm_kwargs: dict[str, Any]) -> list[Tensor]:
        """The patches of a batch, as they were given: their rows follow one another."""
        parts: list[Tensor] = []
        for key, grid_key in _INPUT_KEYS:
            value, grid = mm_kwargs.get(key), mm_kwargs.get(grid_key)
            given = [] if value is None else [value] if isinstance(value, torch.Tensor) else list(value)
            for tensor in given:
                if tensor.dim() != 2 or tensor.shape[1] != self.patch_features:
                    raise InputError(
                        f"{key}: expected (patches, {self.patch_features}); got {tuple(tensor.shape)}; "
                        "pass the flattened patches that the tower's image processor makes"
                    )
            rows = sum(tensor.shape[0] for tensor in given)
            grids = [] if grid is None else grids_of.read_grids(grid, self.merge_size, grid_key)
            expected = grids_of.count_patches(grids)
            if rows != expected:
                raise InputError(f"{key}: {grid_key} describes {expected} patches; got {rows} rows")
            parts += given
        return parts or [torch.zeros(0, self.patch_features)]


def _first_parameter(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], str]:
    """Where the first parameter of a module is: the dictionary that holds it, and its key there."""
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                return submodule._parameters, name
    raise InputError(f"{type(module).__name__} has no parameters; expected a vision tower")


def _one_or_several(parts: list[Tensor]) -> Tensor | list[Tensor]:
    return parts[0] if len(parts) == 1 else parts


def _parts(tensors: Sequence[Tensor], starts: Sequence[int], items: Sequence[int]) -> list[Tensor]:
    """Views of the rows of some items, one for each run of neighbours.

    Args:
        tensors: the rows of all items, one tensor after another.
        starts: the first row of every item, and the number of rows.
        items: the items wanted, in this order.
    """
    spans: list[list[int]] = []
    for item in items:
        start, end = starts[item], starts[item + 1]
        if spans and spans[-1][1] == start:
            spans[-1][1] = end
        else:
            spans.append([start, end])
    parts = []
    for start, end in spans:
        offset = 0
        for tensor in tensors:
            first, last = max(start - offset, 0), min(end - offset, tensor.shape[0])
            if first < last:
                parts.append(tensor[first:last])
            offset += tensor.shape[0]
    return parts or [tensors[0][:0]]


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

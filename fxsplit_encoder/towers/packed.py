"""Towers that encode a packed sequence of patches described by a grid: the common part of their adapters.

`mm_kwargs` are what Hugging Face's processors make: `pixel_values` (patches, features) with `image_grid_thw`
(images, 3), and `pixel_values_videos` with `video_grid_thw`. Items are the images in order, then the videos.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fxsplit_encoder.attention.hugging_face import use_varlen_attention
from fxsplit_encoder.capture.segments import cover_pad_rows, full_cu_seqlens, segment_capacity
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager.protocol import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
)
from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.base import WrappedTower
from fxsplit_encoder.towers.device_metadata import DeviceMetadata
from fxsplit_encoder.towers.metadata_op import register_tower, vision_metadata
from fxsplit_encoder.towers.rows import one_or_several, rows_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor, nn

    from fxsplit_encoder.towers.grid import Grid

# Metadata that a caller may compute itself, for the tower's own forward.
_PRECOMPUTED = (
    *("cu_seqlens", "position_ids", "interp_indices", "interp_weights", "max_seqlen"),
    *("window_index", "cu_window_seqlens", "max_window_seqlen"),
)
_EMBEDDINGS = ("image_embeds", "video_embeds")


class PackedTower(WrappedTower):
    """A Hugging Face tower behind the manager's protocol, and still a module with the tower's own forward.

    An adapter gives `metadata_columns`, `metadata` and the numbers below; one whose tower attends over other
    segments than frames, or whose own forward does not take all its metadata from outside, also gives
    `segment_inputs` and `segment_lengths`, or a `core` of its own.
    """

    metadata_columns: ClassVar[dict[str, tuple[int, torch.dtype]]]
    """Name, columns and dtype of every per-patch metadata tensor; 0 columns: a vector, (patches,)."""
    segment_inputs: ClassVar[dict[str, int]] = {"cu_seqlens": 1}
    """Every input of cumulative lengths, "cu_seqlens" the last, and how many of its segments take the room of
    one frame: a capture for 8 frames holds 8 times as many."""
    input_names: ClassVar[tuple[str, str]] = ("hidden_states", "grid_thw")
    """What the tower's own forward calls the patches and the grids."""
    input_keys: ClassVar[tuple[tuple[str, str], ...]] = (
        ("pixel_values", "image_grid_thw"),
        ("pixel_values_videos", "video_grid_thw"),
    )
    """What the processor calls the patches and the grids: those of images, then those of videos if the tower
    takes any."""
    takes_options: ClassVar[bool] = True
    """Whether `core` takes the tower's own options; if not, a forward with options is the tower's own, which
    `encoder_cg` does not capture."""
    max_frames_per_video: int = 384
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
        super().__init__(tower)
        self.merge_size = merge_size
        self.rows_per_token: int = merge_size**2
        self.patch_features = patch_features
        self.out_hidden_size = out_hidden_size
        self._device_metadata = DeviceMetadata()
        use_varlen_attention(tower)
        self.registered_name = register_tower(self)
        self.register_forward_pre_hook(_mark_dynamic, with_kwargs=True)

    # --- what an adapter gives

    @abstractmethod
    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """The per-patch metadata of a batch, on the CPU: a tensor of (patches, columns) for each of
        `metadata_columns`.
        """

    def segment_lengths(self, grids: Sequence[Grid]) -> dict[str, list[int]]:
        """The patches of every segment of a batch, for each of `segment_inputs`: its frames."""
        return {"cu_seqlens": grids_of.frame_lengths(grids)}

    def core(
        self, pixel_values: Tensor, cu_seqlens: Tensor, metadata: dict[str, Tensor], **kwargs: Any
    ) -> Any:
        """The tower's forward past its own host metadata, with its own options and output type.

        `metadata`: the per-patch tensors, and the cumulative lengths other than `cu_seqlens`.
        """
        # The patch count bounds every segment, whatever the batch.
        return self.tower(
            pixel_values, None, cu_seqlens=cu_seqlens, max_seqlen=pixel_values.shape[0], **metadata, **kwargs
        )

    def read_grids(self, grids: Any, name: str) -> list[Grid]:
        """A batch's grids as numbers; raises InputError for grids that this tower does not take."""
        return grids_of.read_grids(grids, self.merge_size, name)

    def packed_output(self, output: Any) -> Tensor:
        """(output tokens, out_hidden_size) from the tower's own output type."""
        features: Tensor = output.pooler_output
        return features

    # --- the module

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        """The tower's forward: patches (patches, features), grids (items, 3), its own options and output.

        Raises:
            InputError: the grids do not describe the patches.
        """
        if kwargs.get("return_dict"):
            del kwargs["return_dict"]
        if any(name in _PRECOMPUTED for name in kwargs) or (kwargs and not self.takes_options):
            return self.tower(hidden_states, grid_thw, **kwargs)
        values = vision_metadata(hidden_states, grid_thw, self.registered_name)
        metadata = dict(zip(self.metadata_names, values, strict=True))
        return self.core(hidden_states, metadata.pop("cu_seqlens"), metadata, **kwargs)

    @property
    def metadata_names(self) -> list[str]:
        """The names of all host metadata: per patch, then cumulative lengths."""
        return [*self.metadata_columns, *self.segment_inputs]

    def host_metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """All host metadata of a batch at its true size, on the CPU."""
        return {**self.metadata(grids), **self._cumulative_lengths(grids)}

    def _cumulative_lengths(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        lengths = self.segment_lengths(grids)
        return {
            name: torch.from_numpy(grids_of.cumulative_lengths(lengths[name])) for name in self.segment_inputs
        }

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        """Patches and the grid of one image of the smallest budget's size."""
        rows = self.min_item_tokens * self.rows_per_token
        patches = torch.randn(rows, self.patch_features, device=self.device, dtype=self.dtype)
        return patches, torch.tensor([[1, self.merge_size, rows // self.merge_size]])

    # --- the manager's protocol

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """What a capture of this tower needs."""
        return EncoderCudaGraphConfig(
            modalities=list(self.modalities),
            buffer_keys=["pixel_values", *self.metadata_names],
            out_hidden_size=self.out_hidden_size,
            padding_logics=dict.fromkeys(self.segment_inputs, cover_pad_rows),
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
        return [
            modality
            for modality, (_, key) in zip(("image", "video"), self.input_keys, strict=False)
            if mm_kwargs.get(key) is not None
            for _ in range(len(mm_kwargs[key]))
        ]

    def item_frames(self, mm_kwargs: dict[str, Any]) -> list[int]:
        """The grid frames of every item; an image has one."""
        return [t for t, _, _ in self.item_grids(mm_kwargs)]

    def item_segments(self, mm_kwargs: dict[str, Any]) -> list[int]:
        """The share of a capture's attention segments that every item takes: its frames, or more where
        another of its inputs of cumulative lengths needs more.
        """
        return [
            max(
                -(-len(lengths) // self.segment_inputs[name])
                for name, lengths in self.segment_lengths([grid]).items()
            )
            for grid in self.item_grids(mm_kwargs)
        ]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The batch of some items, in the order of `indices`."""
        grids = self.item_grids(mm_kwargs)
        starts = grids_of.cumulative_lengths([t * h * w for t, h, w in grids]).tolist()
        pixels, num_images = self._pixels(mm_kwargs), self.item_modalities(mm_kwargs).count("image")
        images = list(itertools.takewhile(lambda index: index < num_images, indices))
        videos = indices[len(images) :]
        if min(videos, default=num_images) < num_images:
            # In an order that the keys cannot tell; a video is an image of frames.
            images, videos = indices, []
        selected: dict[str, Any] = {}
        for items, (key, grid_key) in zip((images, videos), self.input_keys, strict=False):
            if items:
                selected[key] = one_or_several(rows_of(pixels, starts, items))
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
        values = self.metadata(dummy)
        # Only the number of frames has a limit in `max_batch_size` and `max_frames_per_batch`.
        only_frames = max(self.segment_inputs.values()) == 1
        most = max_batch_size + max_frames_per_batch if only_frames else token_budget
        segments = segment_capacity(token_budget, most)
        for name, factor in self.segment_inputs.items():
            room = factor * (segments + 1)
            values[name] = full_cu_seqlens(room, rows, 1 if factor == 1 else room)
        pixels = torch.randn(rows, self.patch_features, device=device, dtype=dtype)
        # Copies: replays write to these tensors, and metadata may be what a cache of frames holds.
        moved = {name: value.to(device=device, copy=True) for name, value in values.items()}
        return EncoderCudaGraphCaptureInputs({"pixel_values": pixels, **moved})

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> EncoderCudaGraphReplayBuffers:
        """The batch's tensors at their true sizes; metadata on the CPU, or on the device where it was kept
        there.
        """
        grids = tuple(self.item_grids(mm_kwargs))
        if self.device.type == "cuda":
            metadata = self._device_metadata.of(grids, self.metadata, self.device)
        else:
            metadata = self.metadata(grids)
        pixels = one_or_several(self._pixels(mm_kwargs))
        return EncoderCudaGraphReplayBuffers(
            {"pixel_values": pixels, **metadata, **self._cumulative_lengths(grids)}
        )

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        """The forward on prepared tensors: what is traced and captured."""
        metadata = {name: inputs[name] for name in self.metadata_names if name != "cu_seqlens"}
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
            for _, key in self.input_keys
            if mm_kwargs.get(key) is not None
            for grid in self.read_grids(mm_kwargs[key], key)
        ]

    def _pixels(self, mm_kwargs: dict[str, Any]) -> list[Tensor]:
        """The patches of a batch, as they were given but flat: their rows follow one another."""
        parts: list[Tensor] = []
        for key, grid_key in self.input_keys:
            value, grid = mm_kwargs.get(key), mm_kwargs.get(grid_key)
            given = [] if value is None else [value] if isinstance(value, torch.Tensor) else list(value)
            given = [tensor.flatten(1) if tensor.dim() > 2 else tensor for tensor in given]
            for tensor in given:
                if tensor.dim() != 2 or tensor.shape[1] != self.patch_features:
                    raise InputError(
                        f"{key}: expected (patches, {self.patch_features}); got {tuple(tensor.shape)}; "
                        "pass the flattened patches that the tower's image processor makes"
                    )
            rows = sum(tensor.shape[0] for tensor in given)
            grids = [] if grid is None else self.read_grids(grid, grid_key)
            expected = grids_of.count_patches(grids)
            if rows != expected:
                raise InputError(f"{key}: {grid_key} describes {expected} patches; got {rows} rows")
            parts += given
        return parts or [torch.zeros(0, self.patch_features)]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mark_dynamic(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Tells Dynamo, before it traces, that patches and items vary, so that one trace serves every batch.

    It runs outside of the compiled frame. The marks go on aliases: the caller's tensors stay as they are.
    """
    assert isinstance(module, PackedTower)
    names = module.input_names
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    patches, grid = (values.get(name) for name in names)
    if not (isinstance(patches, torch.Tensor) and isinstance(grid, torch.Tensor)):
        return args, kwargs
    if patches.dim() > 1 and patches.shape[0] > 1:
        patches = patches.view_as(patches)
        torch._dynamo.mark_dynamic(patches, 0)
        torch._dynamo.mark_static(patches, list(range(1, patches.dim())))
    if grid.dim() == 2 and grid.shape[0] > 0:
        grid = grid.view_as(grid)
        # One image is a size like any other: a backed size of 1 would be specialised.
        torch._dynamo.decorators.mark_unbacked(grid, 0)
        torch._dynamo.mark_static(grid, 1)
    return (patches, grid), {k: v for k, v in kwargs.items() if k not in names}

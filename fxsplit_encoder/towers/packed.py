"""Adapters of towers that encode a packed sequence of patches described by grids: `pixel_values` (patches,
features) with `image_grid_thw` (images, 3), and `pixel_values_videos` with `video_grid_thw`, as processors of
Hugging Face make them. Items are the images, then the videos.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.dispatch import define_op
from fxsplit_encoder._torch.dynamo import Marks
from fxsplit_encoder._torch.staging import mark_immutable, to_device
from fxsplit_encoder.caching import read_once
from fxsplit_encoder.capture.inputs import example_values, full_cu_seqlens, segment_capacity
from fxsplit_encoder.compile.options import HostOp, register_host_op
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.protocol import (
    BudgetDeclaration,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
)
from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers import inputs
from fxsplit_encoder.towers.base import WrappedTower, is_hugging_face, registered_tower
from fxsplit_encoder.towers.grid import Grid
from fxsplit_encoder.towers.inputs import MOST_PLANNED_ITEMS, MOST_ROWS, number_of, one_or_several

_EMBEDDINGS = ("image_embeds", "video_embeds")

# Methods that the manager calls for the sizes of items.
_ASKED = ("get_encoder_cudagraph_item_specs", "item_modalities", "item_frames", "item_segments")

# Patches of metadata that are kept in all, 48 bytes each in Qwen3-VL: 12 MiB; of a single batch a sixteenth.
_KEPT_PATCHES = 1 << 18
_MOST_PATCHES = _KEPT_PATCHES // 16


class PackedTower(WrappedTower):
    """A packed tower behind the manager's protocol, and still a module with the tower's own forward.

    Attention of a Hugging Face module is set to `fxsplit::varlen_attention`; other modules call
    `kernels.attention.varlen_attention`. A subclass gives `metadata_columns`, `metadata` and the numbers
    below; `segment_inputs` and `segment_lengths` if segments are no frames, `core` if the tower's forward
    makes metadata itself.

    Args:
        merge_size: patches that merge into one output token along each side.
        patch_features: columns of a flattened patch.
        out_hidden_size: columns of the output.
    """

    input_keys: ClassVar[tuple[tuple[str, str], ...]] = (
        ("pixel_values", "image_grid_thw"),
        ("pixel_values_videos", "video_grid_thw"),
    )
    """The processor's names of patches and grids, of images and, if the tower takes any, of videos."""
    input_names: Sequence[str] = ("hidden_states", "grid_thw")
    """Patches and grids, the tower's own forward's names."""
    metadata_columns: Mapping[str, tuple[int, torch.dtype]]
    """Name, columns and dtype of every per-patch metadata tensor; 0 columns: a vector, (patches,)."""
    segment_inputs: ClassVar[dict[str, int]] = {"cu_seqlens": 1}
    """Every input of cumulative lengths, "cu_seqlens" the last, and its segments per frame in a capture."""
    max_frames_per_video: int = 384
    """Grid frames of the longest video: 768 frames, which the processors merge in pairs."""
    frames_are_independent: bool = False
    """Whether a video's rows are those of its grid frames, each encoded alone, one after the other."""
    items_are_segments: bool = False
    """Whether the frames of a video attend to one another."""
    min_item_tokens: ClassVar[int] = 64
    """The smallest item worth a budget of its own: 256 x 256 pixels."""
    max_budget: ClassVar[int] = 4096
    """The largest batch worth capturing; on one H200 the exact shape is as fast from about 800 tokens on."""
    modalities: Sequence[str] = ("image", "video")
    """The modalities that captures serve: not "video" if its tokens are pruned by content, so that their
    number is not known before they are encoded."""

    def __init__(
        self, tower: nn.Module, *, merge_size: int, patch_features: int, out_hidden_size: int
    ) -> None:
        super().__init__(tower)
        self.merge_size = merge_size
        self.rows_per_token: int = merge_size**2
        self.patch_features = patch_features
        self.patch_view: tuple[int, ...] = (-1, patch_features)
        """Sizes of patches as the tower's forward takes them; -1: their number."""
        self.out_hidden_size = out_hidden_size
        self._known_requests = _KnownRequests()
        self._kept_metadata: dict[tuple[torch.device, tuple[Grid, ...]], dict[str, Tensor]] = {}
        """By device and grids, in the order of use; all of it is immutable."""
        self._kept_patches = 0
        # A subclass may have methods that look at more than grids.
        self._items_are_grids = all(
            getattr(type(self), name) is getattr(PackedTower, name) for name in _ASKED
        )
        if is_hugging_face(tower):
            from fxsplit_encoder.kernels.attention.hugging_face import use_varlen_attention

            use_varlen_attention(tower)

    # --- methods of adapters

    @abstractmethod
    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Per-patch metadata of a batch on the CPU: (patches, columns) for each of `metadata_columns`."""

    def read_grids(self, grids: Any, name: str) -> list[Grid]:
        """A batch's grids as numbers; raises InputError for grids that this tower does not take."""
        return grids_of.read_grids(grids, self.merge_size, name)

    def segment_lengths(self, grids: Sequence[Grid]) -> dict[str, list[int]]:
        """The patches of every segment of a batch, for each of `segment_inputs`: its frames, or its items."""
        if self.items_are_segments:
            return {"cu_seqlens": [t * h * w for t, h, w in grids]}
        return {"cu_seqlens": grids_of.frame_lengths(grids)}

    def num_segments(self, grid: Grid) -> dict[str, int]:
        """Segments of an item for each of `segment_inputs`; an override may compute it faster."""
        if type(self).segment_lengths is PackedTower.segment_lengths:
            return {"cu_seqlens": 1 if self.items_are_segments else grid[0]}
        return {name: len(lengths) for name, lengths in self.segment_lengths([grid]).items()}

    def core(self, pixel_values: Tensor, cu_seqlens: Tensor, metadata: dict[str, Tensor]) -> Any:
        """The tower's forward after its host metadata: per-patch tensors, then other cumulative lengths."""
        # The patch count bounds every segment, whatever the batch.
        return self.tower(
            pixel_values, None, cu_seqlens=cu_seqlens, max_seqlen=pixel_values.shape[0], **metadata
        )

    def packed_output(self, output: Any) -> Tensor:
        """(output tokens, out_hidden_size) from the tower's own output type."""
        features: Tensor = output.pooler_output
        return features

    def item_spec(self, grid: Grid) -> EncoderItemSpec:
        """The patches and output tokens of an item."""
        t, h, w = grid
        return EncoderItemSpec(input_size=t * h * w, output_tokens=t * h * w // self.rows_per_token)

    # --- reading a batch

    def read_request(self, mm_kwargs: dict[str, Any], *, planned: bool = False) -> _Request:
        """The grids and the patches of a batch; for a plan (`planned`) patches may be missing. InputError if
        an input is missing or wrong, or grids do not describe the patches.
        """
        request: _Request = read_once(self, mm_kwargs, functools.partial(self._look_up, mm_kwargs))
        if request.described.missing is not None and not planned:
            key, grid_key = request.described.missing
            raise InputError(
                f"{key}: expected the patches that {grid_key} describes; got 0 rows, it is missing"
            )
        return request

    def _look_up(self, mm_kwargs: dict[str, Any]) -> _Request:
        seen = _look(mm_kwargs, self.input_keys)
        if seen is None:
            return self._read_request(mm_kwargs)
        key, patches, snapshot = seen
        described = self._known_requests.get(key)
        if described is None:
            try:
                described = self._read_request(snapshot).described
            except InputError:
                return self._read_request(mm_kwargs)  # for an error about the inputs as they were given
            if len(self._known_requests) >= _KEPT:
                self._known_requests.clear()
            self._known_requests[key] = described
        return _Request(described, patches, True)

    def _read_request(self, mm_kwargs: dict[str, Any]) -> _Request:
        for key in _EMBEDDINGS:
            if mm_kwargs.get(key) is not None:
                raise InputError(
                    f"{key}: these are embeddings already, expected pixels; leave them out and encode the "
                    "other items"
                )
        self.check_given(mm_kwargs, [*itertools.chain(*self.input_keys)])
        grids: list[list[Grid]] = []
        patches: list[Tensor] = []
        missing = None
        for key, grid_key in self.input_keys:
            given, described = mm_kwargs.get(key), mm_kwargs.get(grid_key)
            if given is not None and described is None:
                raise InputError(f"{grid_key}: expected the grids of {key}; got None; pass both or neither")
            parts = inputs.pixel_parts(given, key, self.check_patches)
            patches += parts
            rows = None if given is None else sum(part.shape[0] for part in parts)
            if described is not None and given is None:
                missing = missing or (key, grid_key)
            claim = f"{key}: {grid_key} describes"
            grids.append([] if described is None else self.grids_of_rows(described, grid_key, rows, claim))
        return _Request(_Described(tuple(itertools.chain(*grids)), len(grids[0]), missing), patches, False)

    def check_patches(self, patches: Any, name: str) -> None:
        """Raises InputError unless patches are a tensor of (patches, features), in any shape of features."""
        inputs.check_pixels(patches, name)
        shape = patches.shape
        if len(shape) < 2 or math.prod(shape[1:]) != self.patch_features:
            raise InputError(
                f"{name}: expected (patches, {self.patch_features}); got {tuple(shape)}; "
                "pass the flattened patches that the tower's image processor makes"
            )

    def grids_of_rows(self, grids: Any, name: str, rows: int | None, claim: str) -> list[Grid]:
        """The grids that describe `rows` rows of patches (None: any number, for a plan), else InputError
        about `name`, or with `claim` as the begin of its message.
        """
        capacity = MOST_PLANNED_ITEMS if rows is None else rows // self.rows_per_token
        if number_of(grids) > capacity:
            got = "a plan without pixels has capacity" if rows is None else f"got {rows} rows, capacity"
            raise InputError(f"{claim} {number_of(grids)} items; {got} for {capacity} at most")
        result = self.read_grids(grids, name)
        patches = grids_of.count_patches(result)
        if patches > MOST_ROWS and rows is None:
            raise InputError(f"{claim} {patches} patches; a batch has {MOST_ROWS} at most")
        if patches != rows and rows is not None:
            raise InputError(f"{claim} {patches} patches; got {rows} rows")
        return result

    def item_grids(self, mm_kwargs: dict[str, Any]) -> Sequence[Grid]:
        """The grids of a batch, images' then videos'; raises as `read_request`."""
        return self.read_request(mm_kwargs, planned=True).described.grids

    def flat_patches(self, patches: Sequence[Tensor]) -> list[Tensor]:
        """(patches, features) of every tensor of a request; one without rows if there is none."""
        flat = [part.flatten(1) if part.dim() > 2 else part for part in patches]
        return flat or [torch.zeros(0, self.patch_features, dtype=torch.float32, device="cpu")]

    def viewed(self, patches: Tensor) -> Tensor:
        """Flattened patches in the shape that the tower takes."""
        return patches.view([patches.shape[0] if size == -1 else size for size in self.patch_view])

    # --- the module

    def own_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Patches and grids of a call, by position or by `input_names`; InputError if one is missing."""
        values = {**dict(zip(self.input_names, args, strict=False)), **kwargs}
        for name in self.input_names:
            if values.get(name) is None:
                raise InputError(f"{name}: expected a tensor; got None")
        patches, grid = (values[name] for name in self.input_names)
        return patches, grid

    def traced_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Aliases of patches and grids, marked as of varying sizes for Dynamo; InputError for others."""
        patches, grid = self.own_inputs(args, kwargs)
        self.check_patches(patches, self.input_names[0])
        inputs.check_integers(grid, self.input_names[1])
        if patches.shape[0] > 1:
            patches = _PATCHES.on_alias(patches)
        if grid.dim() == 2 and grid.shape[0] > 0:
            grid = _GRIDS.on_alias(grid)
        return (patches, grid), {}

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Any:
        """The tower's forward and output, for patches and grids (items, 3); InputError if grids do not
        describe the patches. A call of the module takes the tower's `input_names` and options; with options
        that change the output, the tower itself runs.
        """
        values = vision_metadata(hidden_states, grid_thw, self.registered_name)
        metadata = dict(zip(self.metadata_names, values, strict=True))
        self.trace_plain_blocks_once()
        return self.core(hidden_states, metadata.pop("cu_seqlens"), metadata)

    @property
    def metadata_names(self) -> list[str]:
        """The names of all host metadata: per patch, then cumulative lengths."""
        return [*self.metadata_columns, *self.segment_inputs]

    def host_metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """All host metadata of a batch at its true size, on the CPU."""
        return {**self.metadata(grids), **self.cumulative_lengths(grids)}

    def kept_metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """The same, immutable and cached for recurring batches, per patch on the device; of a large batch not
        kept, and on the CPU. A capture that takes a permutation on a device does not check it.
        """
        key = self.device, tuple(grids)
        kept = self._kept_metadata.pop(key, None)
        if kept is None:
            patches = grids_of.count_patches(grids)
            if patches > _MOST_PATCHES:
                return self.host_metadata(grids)
            with torch.inference_mode(False):  # others may need these tensors outside it
                moved = {name: to_device(value, key[0]) for name, value in self.metadata(grids).items()}
                kept = {
                    name: mark_immutable(value)
                    for name, value in {**moved, **self.cumulative_lengths(grids)}.items()
                }
            self._kept_patches += patches
            while self._kept_patches > _KEPT_PATCHES:
                oldest = next(iter(self._kept_metadata))
                self._kept_patches -= grids_of.count_patches(oldest[1])
                del self._kept_metadata[oldest]
        self._kept_metadata[key] = kept
        return kept

    def cumulative_lengths(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """(segments + 1,) int32 on the CPU for each of `segment_inputs`."""
        lengths = self.segment_lengths(grids)
        return {
            name: torch.from_numpy(grids_of.cumulative_lengths(lengths[name])) for name in self.segment_inputs
        }

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        """Patches and the grid of one image of the smallest budget's size."""
        rows = self.min_item_tokens * self.rows_per_token
        patches = self.viewed(example_values((rows, self.patch_features), self.device, self.dtype))
        return patches, torch.tensor([[1, self.merge_size, rows // self.merge_size]], device="cpu")

    # --- the manager's protocol

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """The constants of a capture of this tower."""
        return EncoderCudaGraphConfig(
            modalities=list(self.modalities),
            buffer_keys=["pixel_values", *self.metadata_names],
            out_hidden_size=self.out_hidden_size,
            max_frames_per_video=self.max_frames_per_video,
        )

    def get_encoder_cudagraph_budget_range(self, vllm_config: Any) -> tuple[int, int]:
        """The smallest and the largest useful budget, in output tokens."""
        return self.min_item_tokens, self.max_budget

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """Patches and output tokens of every item; patches may be missing. Raises as `read_request`."""
        return [self.item_spec(grid) for grid in self.item_grids(mm_kwargs)]

    def item_modalities(self, mm_kwargs: dict[str, Any]) -> list[str]:
        """ "image" or "video" for every item."""
        described = self.read_request(mm_kwargs, planned=True).described
        num_videos = len(described.grids) - described.num_images
        return ["image"] * described.num_images + ["video"] * num_videos

    def item_frames(self, mm_kwargs: dict[str, Any]) -> list[int]:
        """The grid frames of every item; an image has one."""
        return [t for t, _, _ in self.item_grids(mm_kwargs)]

    def item_segments(self, mm_kwargs: dict[str, Any]) -> list[int]:
        """Attention segments of every item, in frames: the most of any input of cumulative lengths."""
        return [
            max(-(-count // self.segment_inputs[name]) for name, count in self.num_segments(grid).items())
            for grid in self.item_grids(mm_kwargs)
        ]

    def described_items(self, mm_kwargs: dict[str, Any]) -> Hashable | None:
        """A key equal for batches whose items have equal specs, modalities, frames and segments, or None."""
        request = self.read_request(mm_kwargs, planned=True)
        return request.described if request.is_known and self._items_are_grids else None

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The batch of some items, in the order of `indices`."""
        described, patches, _ = self.read_request(mm_kwargs)
        grids, num_images = described.grids, described.num_images
        starts = grids_of.cumulative_lengths([t * h * w for t, h, w in grids]).tolist()
        pixels = self.flat_patches(patches)
        images = list(itertools.takewhile(lambda index: index < num_images, indices))
        videos = indices[len(images) :]
        if min(videos, default=num_images) < num_images:
            # In an order that the keys cannot tell; a video is an image of frames.
            images, videos = indices, []
        selected: dict[str, Any] = {}
        for items, (key, grid_key) in zip((images, videos), self.input_keys, strict=False):
            if items:
                selected[key] = one_or_several(inputs.rows_of(pixels, starts, items))
                selected[grid_key] = [grids[index] for index in items]
        return selected

    def capture_values(
        self, path: str, token_budget: int, frames: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Pixels and metadata of one image of the budget's size, with room for the segments of many."""
        rows = token_budget * self.rows_per_token
        values = self.metadata([(1, self.merge_size, rows // self.merge_size)])
        only_frames = max(self.segment_inputs.values()) == 1
        segments = segment_capacity(token_budget, frames if only_frames else token_budget)
        for name, factor in self.segment_inputs.items():
            capacity = factor * (segments + 1)
            values[name] = full_cu_seqlens(capacity, rows, 1 if factor == 1 else capacity)
        pixels = example_values((rows, self.patch_features), device, dtype)
        # Copies: replays write to these tensors, and caches of frames may hold metadata.
        moved = {name: value.to(device=device, copy=True) for name, value in values.items()}
        return {"pixel_values": pixels, **moved}

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> EncoderCudaGraphReplayBuffers:
        """The batch's tensors at their true sizes; metadata on the CPU, or cached on the device."""
        request = self.read_request(mm_kwargs)
        metadata = self.kept_metadata(request.described.grids)
        pixels = one_or_several(self.flat_patches(request.patches))
        return EncoderCudaGraphReplayBuffers({"pixel_values": pixels, **metadata})

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        """The traced and captured forward, on prepared tensors."""
        metadata = {name: inputs[name] for name in self.metadata_names if name != "cu_seqlens"}
        return self.packed_output(self.core(inputs["pixel_values"], inputs["cu_seqlens"], metadata))

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        """The same features without a capture."""
        buffers = self.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, 0, 0)
        values = {
            name: (value if isinstance(value, torch.Tensor) else torch.cat(list(value))).to(self.device)
            for name, value in buffers.values.items()
            if value is not None
        }
        return self.encoder_cudagraph_forward(values)


# One image is a size like any other: a backed size of 1 would be specialized.
_PATCHES, _GRIDS = Marks("dynamic"), Marks("unbacked")


# --- a cache of requests
#
# Inputs may change unseen between requests, so each gets a new key: the numbers in its grids, and the shapes
# and dtypes of patches, whose values are not read.

# Requests that are kept, and the most items and tensors of patches of one. Choices: a service sees few sizes.
_KEPT = 1024
MOST_ITEMS = 64


@dataclass(frozen=True, eq=False, slots=True)
class _Described:
    """The items of a request; one object for all requests of equal keys."""

    grids: tuple[Grid, ...]
    """Of the images, then of the videos."""
    num_images: int
    missing: tuple[str, str] | None
    """The names of patches that were not given, and of their grids; None: all were."""


class _Request(NamedTuple):
    described: _Described
    patches: list[Tensor]
    """As they were given; their rows follow one another. Empty for a plan without any."""
    is_known: bool
    """Whether requests of the same grids and shapes of patches get the same `described`."""


class _KnownRequests(dict[Hashable, _Described]):
    def __reduce__(self) -> tuple[type[_KnownRequests], tuple[()]]:
        return _KnownRequests, ()  # copies, also those for other processes, are empty


def _look(
    mm_kwargs: dict[str, Any], input_keys: Sequence[tuple[str, str]]
) -> tuple[Hashable, list[Tensor], dict[str, Any]] | None:
    """Makes the key of a request, and a consistent snapshot of its inputs, which may change at any time: its
    patches, and all with the grids of the key. None if it has other inputs, or inputs of other kinds.
    """
    entries: list[Hashable] = []
    patches: list[Tensor] = []
    kept: dict[str, Any] = {}
    seen = 0
    for key, grid_key in input_keys:
        seen += (key in mm_kwargs) + (grid_key in mm_kwargs)
        parts, grids = mm_kwargs.get(key), mm_kwargs.get(grid_key)
        if parts is not None:
            kept[key] = several = list(parts) if isinstance(parts, list | tuple) else [parts]
            entries.append(key)
            for part in several:
                if type(part) is not Tensor or part.is_nested:
                    return None
                entries.append((part.shape, part.dtype, part.device, part.layout))
            patches += several
        if grids is not None:
            if (numbers := _numbers_of(grids)) is None:
                return None
            entries.append((grid_key, numbers))
            kept[grid_key] = numbers
    if seen != len(mm_kwargs) or not kept or len(patches) > MOST_ITEMS:
        return None
    return tuple(entries), patches, kept


def _numbers_of(grids: Any) -> tuple[tuple[int, ...], ...] | None:
    """A few grids as Python's numbers; None for many, or for other values."""
    if type(grids) is Tensor:
        is_plain = grids.dtype in inputs.INTEGERS and not (grids.is_nested or grids.is_meta)
        if not is_plain or grids.layout != torch.strided or grids.dim() != 2:
            return None
        return tuple(map(tuple, grids.tolist())) if 0 < grids.numel() <= 3 * MOST_ITEMS else None
    if type(grids) is not list or not 0 < len(grids) <= MOST_ITEMS:
        return None
    for row in grids:
        # True and 1.0 are equal to 1, and no integers.
        if type(row) is not tuple or not 0 < len(row) <= 3 or set(map(type, row)) != inputs.ONLY_INTEGERS:
            return None
    return tuple(grids)


# --- `fxsplit::vision_metadata`: a tower's host metadata as one opaque op. A graph with it compiles once for
# all grids: the sizes of its outputs follow from the number of patches, and the trace has no values of grids.


def exact_metadata(pixel_values: Tensor, grid_thw: Tensor, tower_name: str) -> list[Tensor]:
    """Per-patch metadata, then cumulative lengths (segments + 1) on the CPU; all immutable."""
    tower = registered_tower(tower_name)
    metadata = tower.kept_metadata(_read_grids(tower, pixel_values, grid_thw))
    return [metadata[name] for name in tower.metadata_names]


def _padded_metadata(pixel_values: Tensor, grid_thw: Tensor, tower_name: str) -> list[Tensor]:
    """New tensors; cumulative lengths are padded by empty segments to a length that the patches determine."""
    tower, rows = registered_tower(tower_name), pixel_values.shape[0]
    metadata = tower.host_metadata(_read_grids(tower, pixel_values, grid_thw))
    for name in tower.segment_inputs:
        padded = metadata[name].new_full((rows // tower.rows_per_token + 1,), rows)
        padded[: metadata[name].shape[0]] = metadata[name]
        metadata[name] = padded
    kept = [metadata[name] for name in tower.metadata_names]
    moved = [to_device(tensor, pixel_values.device) for tensor in kept]
    return [new.clone() if new is old else new for new, old in zip(moved, kept, strict=True)]


def _read_grids(tower: PackedTower, pixel_values: Tensor, grid_thw: Tensor) -> Sequence[Grid]:
    name = tower.input_names[1]
    return tower.grids_of_rows(grid_thw, name, pixel_values.shape[0], f"{name}: describes")


def _fake(pixel_values: Tensor, grid_thw: Tensor, tower_name: str) -> list[Tensor]:
    tower, rows = registered_tower(tower_name), pixel_values.shape[0]
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((rows, columns) if columns else (rows,), dtype) for columns, dtype in tower.metadata_columns.values()
    ]
    shapes += [((rows // tower.rows_per_token + 1,), torch.int32)] * len(tower.segment_inputs)
    return [torch.empty(shape, dtype=dtype, device=pixel_values.device) for shape, dtype in shapes]


def _segment_factors(pixel_values: Tensor, grid_thw: Tensor, tower_name: str) -> list[int]:
    tower = registered_tower(tower_name)
    return [tower.segment_inputs.get(name, 1) for name in tower.metadata_names]


vision_metadata = define_op(
    "vision_metadata(Tensor pixel_values, Tensor grid_thw, str tower) -> Tensor[]",
    {"CompositeExplicitAutograd": _padded_metadata},
    _fake,
)

register_host_op(
    vision_metadata,
    HostOp(
        run=exact_metadata,
        budgets=BudgetDeclaration(
            rows_per_output_token=lambda pixels, grid, name: registered_tower(name).rows_per_token,
            budget_range=lambda pixels, grid, name: registered_tower(name).get_encoder_cudagraph_budget_range(
                None
            ),
            segment_factors=_segment_factors,
        ),
    ),
)

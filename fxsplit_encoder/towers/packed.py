"""Towers that encode a packed sequence of patches described by a grid: the common part of their adapters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.dynamo import Marks, mark_dynamic, mark_static, mark_unbacked
from fxsplit_encoder._torch.staging import mark_immutable, to_device
from fxsplit_encoder.capture.inputs import example_values, full_cu_seqlens, segment_capacity
from fxsplit_encoder.compile import HostOp, register_host_op
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.protocol import (
    BudgetDeclaration,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
)
from fxsplit_encoder.towers import grid as grids_of
from fxsplit_encoder.towers.base import is_hugging_face, registered_tower
from fxsplit_encoder.towers.grid import Grid
from fxsplit_encoder.towers.inputs import check_integers, one_or_several
from fxsplit_encoder.towers.packed_items import PackedItems

# What items are asked for.
_ASKED = ("get_encoder_cudagraph_item_specs", "item_modalities", "item_frames", "item_segments")


class PackedTower(PackedItems):
    """A packed tower behind the manager's protocol, and still a module with the tower's own forward.

    Attention of a Hugging Face module is set to `fxsplit::varlen_attention`; other modules call
    `kernels.attention.varlen_attention`. An adapter gives `metadata_columns`, `metadata` and the
    numbers below; `segment_inputs` and `segment_lengths`, or its own `core`, where segments are no frames or
    the forward makes metadata itself.
    """

    metadata_columns: ClassVar[dict[str, tuple[int, torch.dtype]]]
    """Name, columns and dtype of every per-patch metadata tensor; 0 columns: a vector, (patches,)."""
    segment_inputs: ClassVar[dict[str, int]] = {"cu_seqlens": 1}
    """Every input of cumulative lengths, "cu_seqlens" the last, and how many of its segments take the place
    of one frame: a capture for 8 frames holds 8 times as many."""
    input_names: Sequence[str] = ("hidden_states", "grid_thw")
    """What the tower's own forward calls the patches and the grids."""
    max_frames_per_video: int = 384
    """Grid frames of the longest video: 768 frames, which the processors merge in pairs."""
    frames_are_independent: ClassVar[bool] = False
    """Whether a video's rows are those of its grid frames, each encoded alone, one after the other: nothing
    attends to another frame, and nothing depends on which frame it is."""
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
        super().__init__(tower, merge_size=merge_size, patch_features=patch_features)
        self.out_hidden_size = out_hidden_size
        self._device_metadata = DeviceMetadata()
        self._items_are_grids = all(
            getattr(type(self), name) is getattr(PackedTower, name) for name in _ASKED
        )
        """Whether items are as grids say: a derived class may have methods of its own that look at more."""
        if is_hugging_face(tower):
            from fxsplit_encoder.kernels.attention.hugging_face import use_varlen_attention

            use_varlen_attention(tower)

    # --- what an adapter gives

    @abstractmethod
    def metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """Per-patch metadata of a batch on the CPU: (patches, columns) for each of `metadata_columns`."""

    def segment_lengths(self, grids: Sequence[Grid]) -> dict[str, list[int]]:
        """The patches of every segment of a batch, for each of `segment_inputs`: its frames."""
        return {"cu_seqlens": grids_of.frame_lengths(grids)}

    def num_segments(self, grid: Grid) -> dict[str, int]:
        """Segments of an item for each of `segment_inputs`. An adapter with `segment_lengths` may override
        it.
        """
        if type(self).segment_lengths is PackedTower.segment_lengths:
            return {"cu_seqlens": grid[0]}
        return {name: len(lengths) for name, lengths in self.segment_lengths([grid]).items()}

    def core(self, pixel_values: Tensor, cu_seqlens: Tensor, metadata: dict[str, Tensor]) -> Any:
        """The tower's forward after its host metadata; `metadata`: the per-patch tensors, then cumulative
        lengths.
        """
        # The patch count bounds every segment, whatever the batch.
        return self.tower(
            pixel_values, None, cu_seqlens=cu_seqlens, max_seqlen=pixel_values.shape[0], **metadata
        )

    def packed_output(self, output: Any) -> Tensor:
        """(output tokens, out_hidden_size) from the tower's own output type."""
        features: Tensor = output.pooler_output
        return features

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
        """Aliases of patches and grids, marked for Dynamo as of varying sizes, so that one trace serves every
        batch.
        """
        patches, grid = self.own_inputs(args, kwargs)
        self.check_own_inputs(patches, grid)
        if patches.shape[0] > 1:
            patches = _PATCHES.on_alias(patches)
        if grid.dim() == 2 and grid.shape[0] > 0:
            grid = _GRIDS.on_alias(grid)
        return (patches, grid), {}

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Any:
        """The tower's forward: patches, grids (items, 3), its own output.

        Called as a module, it takes the tower's `input_names` and options; with options that change the
        output, the tower itself runs. Raises InputError for other inputs, or grids that do not describe the
        patches.
        """
        values = vision_metadata(hidden_states, grid_thw, self.registered_name)
        metadata = dict(zip(self.metadata_names, values, strict=True))
        self.trace_plain_blocks_once()
        output = self.core(hidden_states, metadata.pop("cu_seqlens"), metadata)
        return self.packed_output(output) if self.returns_rows else output

    def check_own_inputs(self, patches: Any, grids: Any) -> None:
        """Raises InputError for inputs that `forward` does not take; grids are checked when read."""
        names = self.input_names
        self.check_patches(patches, names[0])
        check_integers(grids, names[1])

    @property
    def metadata_names(self) -> list[str]:
        """The names of all host metadata: per patch, then cumulative lengths."""
        return [*self.metadata_columns, *self.segment_inputs]

    def host_metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """All host metadata of a batch at its true size, on the CPU."""
        return {**self.metadata(grids), **self._cumulative_lengths(grids)}

    def kept_metadata(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        """The same, immutable and kept for batches that recur: per patch on the device, cumulative lengths on
        the CPU.
        """
        return self._device_metadata.of(tuple(grids), self.device, self.metadata, self._cumulative_lengths)

    def _cumulative_lengths(self, grids: Sequence[Grid]) -> dict[str, Tensor]:
        lengths = self.segment_lengths(grids)
        return {
            name: torch.from_numpy(grids_of.cumulative_lengths(lengths[name])) for name in self.segment_inputs
        }

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        """Patches and the grid of one image of the smallest budget's size."""
        rows = self.min_item_tokens * self.rows_per_token
        patches = example_values((rows, self.patch_features), self.device, self.dtype)
        return patches, torch.tensor([[1, self.merge_size, rows // self.merge_size]], device="cpu")

    # --- the manager's protocol

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """What a capture of this tower needs."""
        return EncoderCudaGraphConfig(
            modalities=list(self.modalities),
            buffer_keys=["pixel_values", *self.metadata_names],
            out_hidden_size=self.out_hidden_size,
            max_frames_per_video=self.max_frames_per_video,
        )

    def get_max_frames_per_video(self) -> int:
        """The most frames that one video may have."""
        return self.max_frames_per_video

    def get_encoder_cudagraph_budget_range(self, vllm_config: Any) -> tuple[int, int]:
        """The smallest and the largest useful budget, in output tokens."""
        return self.min_item_tokens, self.max_budget

    def described_items(self, mm_kwargs: dict[str, Any]) -> Hashable | None:
        """A key equal for batches whose item specs, modalities, frames and segments are equal; None: they
        have to be asked. Raises InputError as `read_request`.
        """
        request = self.read_request(mm_kwargs, planned=True)
        return request.described if request.is_known and self._items_are_grids else None

    def item_segments(self, mm_kwargs: dict[str, Any]) -> list[int]:
        """Attention segments of every item: its frames, or more where another input of cumulative lengths
        needs them.
        """
        return [
            max(-(-count // self.segment_inputs[name]) for name, count in self.num_segments(grid).items())
            for grid in self.item_grids(mm_kwargs)
        ]

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
            capacity = factor * (segments + 1)
            values[name] = full_cu_seqlens(capacity, rows, 1 if factor == 1 else capacity)
        pixels = example_values((rows, self.patch_features), device, dtype)
        # Copies: replays write to these tensors, and metadata may be what a cache of frames holds.
        moved = {name: value.to(device=device, copy=True) for name, value in values.items()}
        return EncoderCudaGraphCaptureInputs({"pixel_values": pixels, **moved})

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> EncoderCudaGraphReplayBuffers:
        """The batch's tensors at their true sizes; metadata on the CPU, or on the device where it is kept."""
        request = self.read_request(mm_kwargs)
        metadata = self.kept_metadata(request.described.grids)
        pixels = one_or_several(self.flat_patches(request.patches))
        return EncoderCudaGraphReplayBuffers({"pixel_values": pixels, **metadata})

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


def _mark_patches(patches: Tensor) -> None:
    mark_dynamic(patches, 0)
    mark_static(patches, list(range(1, patches.dim())))


def _mark_grids(grids: Tensor) -> None:
    # One image is a size like any other: a backed size of 1 would be specialized.
    mark_unbacked(grids, 0)
    mark_static(grids, 1)


_PATCHES, _GRIDS = Marks(_mark_patches), Marks(_mark_grids)


# --- `fxsplit::vision_metadata`: a tower's host metadata as one opaque op.
#
# A graph that contains it compiles once for every grid: the sizes of its outputs follow from the number of
# patches, and what it reads on the host stays out of the trace.


def exact_metadata(pixel_values: Tensor, grid_thw: Tensor, tower_name: str) -> list[Tensor]:
    """Per-patch metadata, then cumulative lengths (segments + 1) on the CPU; all immutable."""
    tower = registered_tower(tower_name)
    metadata = tower.kept_metadata(_read_grids(tower, pixel_values, grid_thw))
    return [metadata[name] for name in tower.metadata_names]


def _padded_metadata(pixel_values: Tensor, grid_thw: Tensor, tower_name: str) -> list[Tensor]:
    """Implements the op: cumulative lengths padded by empty segments to a length that the patches determine.
    Makes new tensors, which a compiler may write to.
    """
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


_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("vision_metadata(Tensor pixel_values, Tensor grid_thw, str tower) -> Tensor[]")
_library.impl("vision_metadata", _padded_metadata, "CompositeExplicitAutograd")


def _fake(pixel_values: Tensor, grid_thw: Tensor, tower_name: str) -> list[Tensor]:
    tower = registered_tower(tower_name)
    rows = pixel_values.shape[0]
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((rows, columns) if columns else (rows,), dtype) for columns, dtype in tower.metadata_columns.values()
    ]
    shapes += [((rows // tower.rows_per_token + 1,), torch.int32)] * len(tower.segment_inputs)
    return [torch.empty(shape, dtype=dtype, device=pixel_values.device) for shape, dtype in shapes]


torch.library.register_fake("fxsplit::vision_metadata", _fake, lib=_library)


vision_metadata = torch.ops.fxsplit.vision_metadata.default

register_host_op(
    vision_metadata,
    HostOp(
        run=exact_metadata,
        budgets=BudgetDeclaration(
            rows_per_output_token=lambda pixels, grid, name: registered_tower(name).rows_per_token,
            budget_range=lambda pixels, grid, name: _budget_range(registered_tower(name)),
            segment_factors=lambda pixels, grid, name: _segment_factors(registered_tower(name)),
        ),
    ),
)


def _budget_range(tower: PackedTower) -> tuple[int, int]:
    return tower.get_encoder_cudagraph_budget_range(None)


def _segment_factors(tower: PackedTower) -> list[int]:
    return [tower.segment_inputs.get(name, 1) for name in tower.metadata_names]


# --- metadata of recent batches

# At most this many patches are kept in all, 48 bytes each in Qwen3-VL: 12 MiB; of a single batch a sixteenth.
_KEPT_PATCHES = 1 << 18
_MOST_PATCHES = _KEPT_PATCHES // 16


class DeviceMetadata:
    """Keeps the metadata of recent batches by their grids, so that it is neither computed nor copied again.

    What comes from here is immutable; a permutation on a device is not checked by the capture that takes it.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, tuple[Grid, ...]], dict[str, Tensor]] = {}
        self._patches = 0

    def of(
        self,
        grids: tuple[Grid, ...],
        device: torch.device,
        per_patch: Callable[[Sequence[Grid]], dict[str, Tensor]],
        lengths: Callable[[Sequence[Grid]], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """All metadata of a batch; of a large batch it is not kept, and lies on the CPU.

        Args:
            per_patch: computes the metadata of every patch, on the CPU.
            lengths: computes the cumulative lengths of segments, which stay on the host.
        """
        kept = self._kept.pop((device, grids), None)
        if kept is None:
            patches = grids_of.count_patches(grids)
            if patches > _MOST_PATCHES:
                return {**per_patch(grids), **lengths(grids)}
            with torch.inference_mode(False):  # others may need these tensors outside it
                moved = {name: to_device(value, device) for name, value in per_patch(grids).items()}
                kept = {name: mark_immutable(value) for name, value in {**moved, **lengths(grids)}.items()}
            self._patches += patches
            while self._patches > _KEPT_PATCHES:
                oldest = next(iter(self._kept))
                self._patches -= grids_of.count_patches(oldest[1])
                del self._kept[oldest]
        self._kept[device, grids] = kept
        return kept

"""`fxsplit::vision_metadata`: a tower's host metadata as one opaque op.

A graph that contains it compiles once for every grid: the sizes of its outputs follow from the number of
patches, and what it reads on the host stays out of the trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.compile import HostOp, register_host_op
from fxsplit_encoder.host_memory import to_device
from fxsplit_encoder.towers.tracing import registered_tower

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fxsplit_encoder.towers.grid import Grid
    from fxsplit_encoder.towers.packed import PackedTower


def exact_metadata(pixel_values: Tensor, grid_thw: Tensor, tower_name: str) -> list[Tensor]:
    """Every per-patch metadata tensor, on the CPU or kept on the device; then the cumulative lengths
    (segments + 1), on the CPU. Nobody may write to them.
    """
    tower = registered_tower(tower_name)
    metadata = tower.kept_metadata(_read_grids(tower, pixel_values, grid_thw))
    return [metadata[name] for name in tower.metadata_names]


def _padded_metadata(pixel_values: Tensor, grid_thw: Tensor, tower_name: str) -> list[Tensor]:
    """What the op's schema promises: cumulative lengths padded, by empty segments, to a length that patches
    determine. New tensors, which a compiler may write to once it has read them.
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
        rows_per_output_token=lambda pixels, grid, name: registered_tower(name).rows_per_token,
        budget_range=lambda pixels, grid, name: _budget_range(registered_tower(name)),
        segment_factors=lambda pixels, grid, name: _segment_factors(registered_tower(name)),
    ),
)


def _budget_range(tower: PackedTower) -> tuple[int, int]:
    return tower.get_encoder_cudagraph_budget_range(None)


def _segment_factors(tower: PackedTower) -> list[int]:
    return [tower.segment_inputs.get(name, 1) for name in tower.metadata_names]

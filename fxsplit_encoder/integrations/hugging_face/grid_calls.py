"""Towers of patches and grids: the Qwen line, GLM and Kimi-K2.5."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.integrations.hugging_face.calls import Call, Calls, Made, Reads, is_pixels
from fxsplit_encoder.planning import MissReason
from fxsplit_encoder.towers.inputs import number_of
from fxsplit_encoder.towers.packed import PackedTower
from fxsplit_encoder.towers.registry import wrap


class GridCalls(Calls):
    """Calls with (patches, ...) and grids (items, 3). A video is an image of several frames here."""

    expected_keys = ((),)

    def __init__(self, twin: nn.Module, reads: Reads, config: EncoderConfig) -> None:
        super().__init__(twin, reads, config)
        adapter = wrap(twin)
        assert isinstance(adapter, PackedTower)
        self._adapter = adapter
        self.input_names = adapter.input_names

    @staticmethod
    def num_items(given: Mapping[str, Any]) -> int:
        """One a grid."""
        return max(1, number_of(given.get("grid_thw")))

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The patches, and the grids as numbers: whatever reads them reads them once, since a tensor on a
        device costs a synchronization.
        """
        if options:
            return MissReason.OPTIONS
        name, grid_name = self.input_names
        patches, grids = given.get(name), given.get(grid_name)
        if not is_pixels(patches) or grids is None:
            return MissReason.UNSUPPORTED_INPUT
        read = self._adapter.read_grids(grids, grid_name)
        return Call({"pixel_values": patches, "image_grid_thw": read}, len(read))

    def example(self, key: Hashable) -> dict[str, Any]:
        """One small image."""
        return dict(zip(self.input_names, self._adapter.example_inputs(), strict=True))

    def adapter(self, key: Hashable, example: Any) -> PackedTower:
        """The adapter of the tower's class."""
        return self._adapter

    def inputs(self, call: Call, adapter: Any) -> dict[str, Any]:
        """As they are."""
        return call.inputs

    def arguments(self, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Patches and grids."""
        return inputs["pixel_values"], torch.tensor(inputs["image_grid_thw"], device="cpu")

    def make(self, call: Call, items: Sequence[Tensor], example: Any) -> Made:
        """The pooled output and the deepstack levels, which follow one another in the columns of an item."""
        shapes = [example.pooler_output.shape[1:]]
        levels = getattr(example, "deepstack_features", None) or ()
        shapes += [level.shape[1:] for level in levels]
        parts: list[Tensor] = []
        start = 0
        for shape in shapes:
            end = start + math.prod(shape)
            parts.append(torch.cat([item[:, start:end] for item in items]).view(-1, *shape))
            start = end
        fields: dict[str, Any] = {"pooler_output": parts[0]}
        if levels:
            fields["deepstack_features"] = parts[1:]
        return Made(fields)

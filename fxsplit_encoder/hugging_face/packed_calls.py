"""Towers of patches and grids: the Qwen line, GLM and Kimi-K2.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.hugging_face.calls import Call, Calls, Made, Reads, is_pixels, twin_of
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.towers.inputs import integer_rows, number_of
from fxsplit_encoder.towers.packed import PackedTower
from fxsplit_encoder.towers.pixtral import PixtralTower
from fxsplit_encoder.towers.registry import wrap
from fxsplit_encoder.towers.rules import GridLook, GridTower, check_values, packed_fields


class GridCalls(Calls):
    """Calls with (patches, ...) and grids (items, 3). A video is an image of several frames here."""

    counted_name = "grid_thw"

    def __init__(self, twin: nn.Module, reads: Reads, config: EncoderConfig, seen: Any = None) -> None:
        super().__init__(twin, reads, config)
        adapter = GridTower(twin, seen) if isinstance(seen, GridLook) else wrap(twin)
        assert isinstance(adapter, PackedTower)
        self._adapter = adapter
        self.input_names = adapter.input_names

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The patches, and the grids as numbers; reading them from a device costs a synchronization."""
        if options:
            return MissReason.OPTIONS
        name, grid_name = self.input_names
        patches, grids = given.get(name), given.get(grid_name)
        if not is_pixels(patches) or grids is None:
            return MissReason.UNSUPPORTED_INPUT
        if isinstance(self._adapter, GridTower):
            patches = self._adapter.flattened(patches)
        read = self._adapter.read_grids(grids, grid_name)
        return Call({"pixel_values": patches, "image_grid_thw": read})

    def example(self, key: Any) -> dict[str, Any]:
        """One small image."""
        return dict(zip(self.input_names, self._adapter.example_inputs(), strict=True))

    def adapter(self, key: Any, example: Any) -> PackedTower:
        """The adapter of the tower's class; by the rule, after calls with values have shown it to be true."""
        if isinstance(self._adapter, GridTower):
            check_values(twin_of(self.twin), self._adapter)
        return self._adapter

    def make(self, call: Call, items: Sequence[Tensor], example: Any) -> Made:
        """The fields of the output, which follow one another in the columns of an item."""
        adapter = self._adapter
        rows = adapter.min_item_tokens * adapter.rows_per_token
        fields: dict[str, Any] = {}
        start = 0
        for (name, number), value in packed_fields(example, rows, adapter.rows_per_token):
            end = start + value.numel() // adapter.min_item_tokens
            part = torch.cat([item[:, start:end] for item in items])
            is_batch = value.dim() > 2 and value.shape[0] == 1
            part = part.view(1, -1, *value.shape[2:]) if is_batch else part.view(-1, *value.shape[1:])
            if number is None:
                fields[name] = part
            else:
                fields.setdefault(name, []).append(part)
            start = end
        return Made({n: type(example[n])(v) if isinstance(v, list) else v for n, v in fields.items()})


class PixtralCalls(Calls):
    """Calls with (images, channels, height, width), padded, and the size of every image in pixels."""

    input_names = ("pixel_values", "image_sizes")
    counted_name = "pixel_values"
    makes_layers = True

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The images, and their sizes in patches."""
        if options:
            return MissReason.OPTIONS
        pixels, sizes = given.get("pixel_values"), given.get("image_sizes")
        if not is_pixels(pixels, 4):
            return MissReason.UNSUPPORTED_INPUT
        count, _, height, width = pixels.shape
        if sizes is None:
            read = [(height, width)] * count
        elif number_of(sizes) == count:
            read = [
                (h, w) for h, w in integer_rows(sizes, "image_sizes", 2, "rows of two integers, in pixels")
            ]
        else:
            return MissReason.UNSUPPORTED_INPUT
        side = self.twin.config.patch_size
        grids = [(1, min(h, height) // side, min(w, width) // side) for h, w in read]
        return Call({"pixel_values": pixels, "image_grid_thw": grids})

    def example(self, key: Any) -> dict[str, Any]:
        """One image of 2 x 2 patches."""
        config, parameter = self.twin.config, next(self.twin.parameters())
        shape = (1, config.num_channels, 2 * config.patch_size, 2 * config.patch_size)
        pixels = torch.zeros(shape, device=parameter.device, dtype=parameter.dtype)
        return {"pixel_values": pixels}

    def adapter(self, key: Any, example: Any) -> PixtralTower:
        """The adapter of the class, for the layers that the model reads."""
        return PixtralTower(self.twin, self.captured_layers)

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Those that the model reads, with the last if it reads the tower's output."""
        last = self.num_states - 1
        reads_last = not self.layers or "last_hidden_state" in self.fields
        return tuple(dict.fromkeys((*self.layers, *((last,) if reads_last else ()))))

    def makes(self, what: str | int, example: Any) -> bool:
        """Layers, and the last hidden state, which is the last of them."""
        return what == "last_hidden_state" or super().makes(what, example)

    def inputs(self, call: Call, adapter: Any) -> dict[str, Any]:
        """The patches of every image, without its padding."""
        side = adapter.patch_size
        patches = [
            adapter.patches(image[:, : height * side, : width * side])
            for image, (_, height, width) in zip(
                call.inputs["pixel_values"], call.inputs["image_grid_thw"], strict=True
            )
        ]
        return {**call.inputs, "pixel_values": patches}

    def make(self, call: Call, items: Sequence[Tensor], example: Any) -> Made:
        """The layers, whose columns follow one another; (1, patches, hidden_size) each, as the tower's."""
        width = example.last_hidden_state.shape[-1]
        states = {
            layer: torch.cat([item[:, number * width : (number + 1) * width] for item in items])[None]
            for number, layer in enumerate(self.captured_layers)
        }
        last = self.num_states - 1
        return Made({"last_hidden_state": states[last]} if last in states else {}, states)

"""Pixtral's tower, which packs images of any size: in Mistral 3 and in LLaVA."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.integrations.hugging_face.calls import Call, Calls, Made, is_pixels
from fxsplit_encoder.planning import MissReason
from fxsplit_encoder.towers.inputs import integer_rows, number_of
from fxsplit_encoder.towers.pixtral import PixtralTower


class PixtralCalls(Calls):
    """Calls with (images, channels, height, width), padded, and the size of every image in pixels."""

    input_names = ("pixel_values", "image_sizes")
    expected_keys = ((),)
    makes_layers = True

    @staticmethod
    def num_items(given: Mapping[str, Any]) -> int:
        """One an image."""
        return max(1, number_of(given.get("pixel_values")))

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The images, and their sizes in patches."""
        if options:
            return MissReason.OPTIONS
        pixels, sizes = given.get("pixel_values"), given.get("image_sizes")
        if not is_pixels(pixels, 4):
            return MissReason.UNSUPPORTED_INPUT
        assert isinstance(pixels, torch.Tensor)
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
        return Call({"pixel_values": pixels, "image_grid_thw": grids}, count)

    def example(self, key: Hashable) -> dict[str, Any]:
        """One image of 2 x 2 patches."""
        config, parameter = self.twin.config, next(self.twin.parameters())
        shape = (1, config.num_channels, 2 * config.patch_size, 2 * config.patch_size)
        pixels = torch.zeros(shape, device=parameter.device, dtype=parameter.dtype)
        return {"pixel_values": pixels}

    def adapter(self, key: Hashable, example: Any) -> PixtralTower:
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

    def arguments(self, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Patches and grids."""
        return torch.cat(inputs["pixel_values"]), torch.tensor(inputs["image_grid_thw"], device="cpu")

    def make(self, call: Call, items: Sequence[Tensor], example: Any) -> Made:
        """The layers, whose columns follow one another; (1, patches, hidden_size) each, as the tower's."""
        width = example.last_hidden_state.shape[-1]
        states = {
            layer: torch.cat([item[:, number * width : (number + 1) * width] for item in items])[None]
            for number, layer in enumerate(self.captured_layers)
        }
        last = self.num_states - 1
        return Made({"last_hidden_state": states[last]} if last in states else {}, states)

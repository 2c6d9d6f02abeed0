"""SigLIP 2's tower of variable shapes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from fxsplit_encoder.integrations.hugging_face.calls import Call, is_pixels
from fxsplit_encoder.integrations.hugging_face.dense_calls import DenseCalls, DenseKey, Part
from fxsplit_encoder.planning import MissReason
from fxsplit_encoder.towers.dense import DenseTower
from fxsplit_encoder.towers.inputs import integer_rows
from fxsplit_encoder.towers.siglip2 import Siglip2Tower


class Siglip2Calls(DenseCalls):
    """Calls with (images, patches, features), which patches are an image's own, and its rows and columns."""

    input_names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
    makes_layers = False

    @property
    def default_key(self) -> DenseKey:
        """The number of patches that the configuration names."""
        return DenseKey((self.twin.config.num_patches,))

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The patches, and the shapes as numbers."""
        if options:
            return MissReason.OPTIONS
        pixels, mask, shapes = (given.get(name) for name in self.input_names)
        if not is_pixels(pixels, 3) or not isinstance(mask, torch.Tensor) or shapes is None:
            return MissReason.UNSUPPORTED_INPUT
        assert isinstance(pixels, torch.Tensor)
        read = integer_rows(shapes, "spatial_shapes", 2, "rows of two integers, in patches")
        count, patches, _ = pixels.shape
        fits = all(h > 0 and w > 0 and h * w <= patches for h, w in read)
        if len(read) != count or mask.shape != (count, patches) or not fits:
            return MissReason.UNSUPPORTED_INPUT
        inputs = {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": read}
        return Call(inputs, key=DenseKey((patches,)))

    def example(self, key: Hashable) -> dict[str, Any]:
        """One image, of one row of patches."""
        assert isinstance(key, DenseKey)
        (patches,) = key.shape
        config, parameter = self.twin.config, next(self.twin.parameters())
        columns = config.num_channels * config.patch_size**2
        return {
            "pixel_values": torch.zeros(1, patches, columns, device=parameter.device, dtype=parameter.dtype),
            "pixel_attention_mask": torch.ones(1, patches, dtype=torch.int64, device=parameter.device),
            "spatial_shapes": torch.tensor([[1, patches]], device="cpu"),
        }

    def adapter(self, key: Hashable, example: Any) -> DenseTower:
        """The adapter of the class, for so many patches."""
        assert isinstance(key, DenseKey)
        return Siglip2Tower(self.twin, key.shape[0])

    def parts(self, example: Any) -> list[Part]:
        """The last hidden state, and the pooled one."""
        parts = [Part("last_hidden_state", None, example.last_hidden_state.shape[1])]
        if example.pooler_output is not None:
            parts.append(Part("pooler_output", None, 1))
        return parts

    def inputs(self, call: Call, adapter: Any) -> dict[str, Any]:
        """The images with their positions."""
        with torch.inference_mode(False):
            images = adapter.images(*(call.inputs[name] for name in self.input_names))
        return super().inputs(Call({"pixel_values": images}), adapter)

"""Towers of images of one size, declared by what they return: CLIP, SigLIP, DINO, InternVL's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxsplit_encoder._torch.tensors import linked_copy
from fxsplit_encoder.hugging_face.calls import Call, Calls, Made, is_pixels
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.towers.idefics3 import Idefics3Tower
from fxsplit_encoder.towers.inputs import integer_rows
from fxsplit_encoder.towers.registry import DenseTowerSpec, wrap
from fxsplit_encoder.towers.siglip2 import Siglip2Tower
from fxsplit_encoder.towers.step3p7 import CROP_SIZE, Step3p7Tiles
from fxsplit_encoder.towers.tiles import DenseTower

_INTERPOLATES = "interpolate_pos_encoding"


class DenseKey(NamedTuple):
    """Channels, height and width of an image, and whether positions are interpolated for this size."""

    shape: tuple[int, ...]
    interpolates: bool = False


class Part(NamedTuple):
    """A field of the output as rows of an image's features."""

    name: str
    layer: int | None
    rows: int

    def of(self, output: Any) -> Tensor:
        """(images, rows, hidden)."""
        value: Any = getattr(output, self.name)
        features: Tensor = value if self.layer is None else value[self.layer]
        return features if features.dim() == 3 else features[:, None]


class DenseCalls(Calls):
    """Calls with (images, channels, height, width). Every size is captured for itself."""

    input_names: Sequence[str] = ("pixel_values",)
    makes_layers = True
    is_configured = True
    """Whether the default size is the configuration's."""

    @property
    def default_key(self) -> DenseKey:
        """The size of the configuration."""
        config = self.twin.config
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return DenseKey((config.num_channels, height, width))

    @property
    def expected_keys(self) -> Sequence[DenseKey]:
        """This size."""
        return (self.default_key,) if self.is_configured else ()

    @property
    def example_key(self) -> DenseKey:
        """This size, also if no configuration has it."""
        return self.default_key

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The images."""
        pixels = given.get(self.input_names[0])
        interpolates = bool(options.get(_INTERPOLATES))
        if options.keys() - {_INTERPOLATES}:
            return MissReason.OPTIONS
        if not is_pixels(pixels, 4):
            return MissReason.UNSUPPORTED_INPUT
        return Call({self.input_names[0]: pixels}, key=DenseKey(tuple(pixels.shape[1:]), interpolates))

    def example(self, key: Any) -> dict[str, Any]:
        """One image of zeros."""
        parameter = next(self.twin.parameters())
        pixels = torch.zeros(1, *key.shape, device=parameter.device, dtype=parameter.dtype)
        return {self.input_names[0]: pixels, **self._options(key)}

    def _options(self, key: DenseKey) -> dict[str, Any]:
        options = {_INTERPOLATES: True} if key.interpolates else {}
        return {**options, "output_hidden_states": True} if self.layers else options

    def adapter(self, key: Any, example: Any) -> DenseTower:
        """By a declaration: the rows of every part follow one another for each image."""
        parts = self.parts(example)
        channels, height, width = key.shape
        spec = DenseTowerSpec(
            (channels, height, width),
            sum(part.rows for part in parts),
            parts[0].of(example).shape[-1],
            output=lambda output: torch.cat([part.of(output) for part in parts], dim=1),
            input_name=self.input_names[0],
            options=self._options(key),
            has_plain_blocks=not self.layers,  # hidden states are what blocks return
        )
        adapter = wrap(self.twin, spec)
        assert isinstance(adapter, DenseTower)
        return adapter

    def parts(self, example: Any) -> list[Part]:
        """The captured layers and fields: those that the model reads, or the tower's output, pooled too."""
        layers = self.layers
        parts = [Part("hidden_states", n, example.hidden_states[n].shape[1]) for n in layers]
        # Models differ in whether they read the last layer before or after its norm.
        if not layers or self.num_states - 1 in layers or "last_hidden_state" in self.fields:
            parts.append(Part("last_hidden_state", None, example.last_hidden_state.shape[1]))
        if (not layers or "pooler_output" in self.fields) and self.makes("pooler_output", example):
            parts.append(Part("pooler_output", None, 1))
        return parts

    def makes(self, what: str | int, example: Any) -> bool:
        """Layers, the last hidden state, and the pooled one if it is as wide as that."""
        last, pooled = example.last_hidden_state, getattr(example, "pooler_output", None)
        if what == "pooler_output" and pooled is not None:
            return bool(pooled.dim() == 2 and pooled.shape[-1] == last.shape[-1])
        return what == "last_hidden_state" or super().makes(what, example)

    def inputs(self, call: Call, adapter: Any) -> dict[str, Any]:
        """The images, as few items as the largest budget holds."""
        pixels = call.inputs[self.input_names[0]]
        tokens = adapter.tokens_per_tile
        largest = max(self.config.token_budgets, default=tokens * adapter.max_tiles)
        most = max(1, largest // tokens)
        count = pixels.shape[0]
        counts = [min(most, count - start) for start in range(0, count, most)]
        return {self.input_names[0]: pixels, adapter.count_keys[0]: counts}

    def arguments(self, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The images."""
        return (inputs[self.input_names[0]],)

    def make(self, call: Call, items: Sequence[Tensor], example: Any) -> Made:
        """Every part, in memory of its own."""
        parts = self.parts(example)
        rows = items[0] if len(items) == 1 else torch.cat(list(items))
        images = rows.view(-1, sum(part.rows for part in parts), rows.shape[-1])
        fields: dict[str, Any] = {}
        layers: dict[int, Tensor] = {}
        for part, value in zip(parts, torch.split(images, [part.rows for part in parts], dim=1), strict=True):
            if part.layer is not None:
                layers[part.layer] = value.contiguous()
            elif getattr(example, part.name).dim() == 3:
                fields[part.name] = value.contiguous()
            else:
                fields[part.name] = value[:, 0].contiguous()
        return Made(fields, layers)


# --- towers of tiles with adapters of their own


class Llama4Calls(DenseCalls):
    """Llama 4's tower, which takes one size and is wrapped by an adapter of its own."""

    makes_layers = False

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The tiles."""
        call = super().read(given, options)
        if isinstance(call, Call) and call.key != self.default_key:
            return MissReason.UNSUPPORTED_INPUT
        return call

    def adapter(self, key: Any, example: Any) -> DenseTower:
        """The adapter of the class, which computes without complex numbers."""
        adapter = wrap(self.twin)
        assert isinstance(adapter, DenseTower)
        return adapter


class Step3p7Calls(DenseCalls):
    """Step-3.7's tower, called with whole images, and with crops of another size."""

    makes_layers = False

    @property
    def expected_keys(self) -> Sequence[DenseKey]:
        """Both sizes."""
        whole = self.default_key
        return whole, DenseKey((whole.shape[0], CROP_SIZE, CROP_SIZE))

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The tiles, if they are square."""
        call = super().read(given, options)
        if isinstance(call, Call):
            _, height, width = call.key.shape
            if height != width or call.key.interpolates:
                return MissReason.UNSUPPORTED_INPUT
        return call

    def adapter(self, key: Any, example: Any) -> DenseTower:
        """The adapter of the class, on a copy of the modules, since it stores tables in them."""
        return Step3p7Tiles(linked_copy(self.twin), key.shape[-1])


class Idefics3Calls(DenseCalls):
    """Idefics 3's and SmolVLM's tower. Images with padding go to the tower itself."""

    input_names = ("pixel_values", "patch_attention_mask")

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The images, if all are whole."""
        mask = given.get("patch_attention_mask")
        if isinstance(mask, torch.Tensor) and not bool(mask.all()):
            return MissReason.UNSUPPORTED_INPUT
        return super().read(given, options)

    def adapter(self, key: Any, example: Any) -> DenseTower:
        """The adapter of the class, for images of this size."""
        layers = [part.layer for part in self.parts(example)]
        _, height, width = key.shape
        return Idefics3Tower(self.twin, height, width, layers)


class Siglip2Calls(DenseCalls):
    """Calls with (images, patches, features), a mask of an image's own patches, and its rows and columns."""

    input_names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
    makes_layers = False

    @property
    def default_key(self) -> DenseKey:
        """The number of patches of the configuration."""
        return DenseKey((self.twin.config.num_patches,))

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The patches, and the shapes as numbers."""
        if options:
            return MissReason.OPTIONS
        pixels, mask, shapes = (given.get(name) for name in self.input_names)
        if not is_pixels(pixels, 3) or not isinstance(mask, torch.Tensor) or shapes is None:
            return MissReason.UNSUPPORTED_INPUT
        read = integer_rows(shapes, "spatial_shapes", 2, "rows of two integers, in patches")
        count, patches, _ = pixels.shape
        fits = all(h > 0 and w > 0 and h * w <= patches for h, w in read)
        if len(read) != count or mask.shape != (count, patches) or not fits:
            return MissReason.UNSUPPORTED_INPUT
        inputs = {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": read}
        return Call(inputs, key=DenseKey((patches,)))

    def example(self, key: Any) -> dict[str, Any]:
        """One image, of one row of patches."""
        (patches,) = key.shape
        config, parameter = self.twin.config, next(self.twin.parameters())
        columns = config.num_channels * config.patch_size**2
        return {
            "pixel_values": torch.zeros(1, patches, columns, device=parameter.device, dtype=parameter.dtype),
            "pixel_attention_mask": torch.ones(1, patches, dtype=torch.int64, device=parameter.device),
            "spatial_shapes": torch.tensor([[1, patches]], device="cpu"),
        }

    def adapter(self, key: Any, example: Any) -> DenseTower:
        """The adapter of the class, for so many patches."""
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

"""Towers of images of one size: CLIP, SigLIP, DINO, InternVL's, and, by a rule, those without a name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxsplit_encoder._torch.tensors import linked_copy
from fxsplit_encoder.hugging_face.calls import Call, Calls, Made, is_pixels
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.towers.cropped import CROP_SIZE, Step3p7Tiles
from fxsplit_encoder.towers.dense import Idefics3Tower, Siglip2Tower
from fxsplit_encoder.towers.inputs import integer_rows
from fxsplit_encoder.towers.registry import DenseTowerSpec, wrap
from fxsplit_encoder.towers.rules import Field, field_of
from fxsplit_encoder.towers.tiles import DenseTower

STATES = "hidden_states"
_INTERPOLATES = "interpolate_pos_encoding"
_OUTPUT = ("last_hidden_state", "pooler_output")


class DenseKey(NamedTuple):
    """Channels, height and width of an image, and whether positions are interpolated for this size."""

    shape: tuple[int, ...]
    interpolates: bool = False


class DenseCalls(Calls):
    """Calls with (images, channels, height, width). Every size is captured for itself."""

    input_names: Sequence[str] = ("pixel_values",)
    makes_layers = True
    is_configured = True
    """Whether the size of an example is the configuration's."""
    is_named = True
    """Whether it is known by its name that images are encoded one by one, that blocks return one tensor, and
    that a model which reads layers reads nothing else."""

    @property
    def example_key(self) -> DenseKey:
        """The size of the configuration."""
        config = self.twin.config
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return DenseKey((config.num_channels, height, width))

    @property
    def expected_keys(self) -> Sequence[DenseKey]:
        """This size."""
        return (self.example_key,) if self.is_configured else ()

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
        """By a declaration: all fields of an image are numbers one after the other, cut into the rows of a
        tile, of which the last one is padded.
        """
        names = self.captured(example)
        first = field_of(example, names[0])
        width = first.shape[1] if first.dim() > 3 else first[0].numel() if first.dim() < 3 else first.shape[2]
        numbers = sum(field_of(example, name).numel() for name in names)
        rows = math.ceil(numbers / width)

        def flattened(output: Any) -> Tensor:
            flat = [field_of(output, name).flatten(1) for name in names]
            if rows * width > numbers:
                flat.append(flat[0].new_zeros(flat[0].shape[0], rows * width - numbers))
            whole = torch.cat(flat, dim=1) if len(flat) > 1 else flat[0]
            return whole.reshape(whole.shape[0], rows, width)

        spec = DenseTowerSpec(
            key.shape,
            rows,
            width,
            output=flattened,
            input_name=self.input_names[0],
            options=self._options(key),
            declares_padding=self.is_named,
            has_plain_blocks=self.is_named and not self.layers,  # hidden states are what blocks return
        )
        adapter = wrap(self.twin, spec)
        assert isinstance(adapter, DenseTower)
        return adapter

    def plain_fields(self, example: Any) -> list[Field]:
        """The tensors of an output that nothing was asked of."""
        return [(name, None) for name in _OUTPUT if example.get(name) is not None]

    def captured(self, example: Any) -> list[Field]:
        """Hidden states that the model reads, and the other fields that it reads; of no states all others."""
        read = set(self.fields)
        # Models differ in whether they read the last layer before or after its norm.
        if self.layers and self.num_states - 1 in self.layers:
            read.add("last_hidden_state")
        reads_all = not (self.layers and self.is_named)
        plain = [field for field in self.plain_fields(example) if reads_all or field[0] in read]
        return [*plain, *((STATES, layer) for layer in self.layers if self.makes(layer, example))]

    def makes(self, what: str | int, example: Any) -> bool:
        """The fields of a plain call, and hidden states with a row for each image."""
        if isinstance(what, str):
            return any(name == what for name, _ in self.plain_fields(example))
        return self.makes_layers and getattr(example[STATES][what], "shape", ())[:1] == (1,)

    def inputs(self, call: Call, adapter: Any) -> dict[str, Any]:
        """The images, as few items as the largest budget holds."""
        pixels = call.inputs[self.input_names[0]]
        tokens = adapter.tokens_per_tile
        largest = max(self.config.token_budgets, default=tokens * adapter.max_tiles)
        most = max(1, largest // tokens)
        count = pixels.shape[0]
        counts = [min(most, count - start) for start in range(0, count, most)]
        return {self.input_names[0]: pixels, adapter.count_keys[0]: counts}

    def make(self, call: Call, items: Sequence[Tensor], example: Any) -> Made:
        """Every field, in memory of its own."""
        names = self.captured(example)
        shapes = [field_of(example, name).shape[1:] for name in names]
        sizes = [shape.numel() for shape in shapes]
        rows = items[0] if len(items) == 1 else torch.cat(list(items))
        count = call.inputs[self.input_names[0]].shape[0]
        parts = torch.split(rows.view(count, -1)[:, : sum(sizes)], sizes, dim=1)
        values = [part.reshape(count, *shape).contiguous() for part, shape in zip(parts, shapes, strict=True)]
        fields: dict[str, Any] = {}
        layers: dict[int, Tensor] = {}
        for (name, number), value in zip(names, values, strict=True):
            if number is None:
                fields[name] = value
            elif name == STATES and name in self.with_states:
                layers[number] = value
            else:
                fields.setdefault(name, []).append(value)
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = type(example[name])(value)
        return Made(fields, layers)


# --- towers of tiles with adapters of their own


class Llama4Calls(DenseCalls):
    """Llama 4's tower, which takes one size and is wrapped by an adapter of its own."""

    makes_layers = False

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The tiles."""
        call = super().read(given, options)
        if isinstance(call, Call) and call.key != self.example_key:
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
        whole = self.example_key
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
        layers = [layer for _, layer in self.captured(example)]
        _, height, width = key.shape
        return Idefics3Tower(self.twin, height, width, layers)


class Siglip2Calls(DenseCalls):
    """Calls with (images, patches, features), a mask of an image's own patches, and its rows and columns."""

    input_names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
    makes_layers = False

    @property
    def example_key(self) -> DenseKey:
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

    def inputs(self, call: Call, adapter: Any) -> dict[str, Any]:
        """The images with their positions."""
        with torch.inference_mode(False):
            images = adapter.images(*(call.inputs[name] for name in self.input_names))
        return super().inputs(Call({"pixel_values": images}), adapter)

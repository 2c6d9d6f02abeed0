"""Converts a tower's arguments to an adapter's inputs, and encoded items to fields of the tower's output."""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.structure import OWN
from fxsplit_encoder._torch.tensors import forward_hooks_of, linked_copy
from fxsplit_encoder._torch.transformers import remove_output_hooks
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.planning.plan import MissReason
from fxsplit_encoder.towers.cropped import CROP_SIZE, Step3p7Tiles
from fxsplit_encoder.towers.dense import Idefics3Tower, Siglip2Tower, siglip2_tiles
from fxsplit_encoder.towers.inputs import integer_rows, number_of
from fxsplit_encoder.towers.packed import PackedTower
from fxsplit_encoder.towers.pixtral import PixtralTower
from fxsplit_encoder.towers.registry import DenseTowerSpec, wrap
from fxsplit_encoder.towers.rules import (
    Field,
    GridLook,
    GridTower,
    check_values,
    field_of,
    packed_fields,
    zeros_for,
)

Reads = frozenset[int | str]

PENDING = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}
"""Options that ask for more fields of the output and change no other, and these fields."""


@dataclass(frozen=True)
class Call:
    """The inputs of one call of a tower's forward."""

    inputs: dict[str, Any]
    key: Any = ()
    """Calls of one tower with equal keys share an adapter."""


Made: TypeAlias = dict[str | int, Any]
"""Fields of a tower's output, and hidden states by their layer; 0 is the input of the first."""

Maker: TypeAlias = Callable[[Call, Sequence[Tensor]], Made]


class Calls(ABC):
    """The calls of one kind of towers.

    Args:
        twin: a linked copy of the tower, whose modules an adapter may change.
        reads: numbers of hidden states and names of fields that the model reads; empty: the whole output.
        seen: for a tower that a rule serves, its second result of `calls_of`.
    """

    input_names: Sequence[str]
    """The forward's names of its inputs, in order; other arguments are options."""
    counted_name: ClassVar[str] = ""
    """The argument with a row for each image or video; empty: statistics count a call as one item."""
    makes_layers: bool = False
    """Whether hidden states can be captured."""
    with_states: frozenset[str] = frozenset({"hidden_states"})
    """Fields that an output has with `output_hidden_states` only."""

    def __init__(self, twin: nn.Module, reads: Reads, config: EncoderConfig, seen: Any = None) -> None:
        self.twin: Any = twin
        self.config = config
        self.layers: tuple[int, ...] = ()
        if self.makes_layers:
            layers = (layer for layer in reads if isinstance(layer, int))
            self.layers = tuple(sorted({layer % self.num_states for layer in layers}))
        self.fields = frozenset(name for name in reads if isinstance(name, str))

    @property
    def num_states(self) -> int:
        """Hidden states of the tower: the input of the first layer, and each layer's output."""
        return int(self.twin.config.num_hidden_layers) + 1

    @property
    def example_key(self) -> Hashable:
        """A key that the tower takes."""
        return ()

    @property
    def expected_keys(self) -> Sequence[Hashable]:
        """The keys of the configuration, captured at the first call or a warm-up; others if they recur."""
        return (self.example_key,)

    @abstractmethod
    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """A call's inputs, or why the tower itself serves it; InputError for what the adapter does not take.
        `given` are the inputs by name, `options` other arguments that change the result.
        """

    @abstractmethod
    def example(self, key: Any) -> dict[str, Any]:
        """Arguments of a small call of the tower itself, whose output has the fields of all."""

    def makes(self, what: str | int, example: Any) -> bool:
        """Whether a field, or the hidden state of a layer, can be captured."""
        return isinstance(what, int) and self.makes_layers

    @abstractmethod
    def adapter(self, key: Any, example: Any) -> Any:
        """The adapter for calls of this key; `example` is the tower's output of it, on the meta device."""

    def inputs(self, call: Call, adapter: Any) -> dict[str, Any]:
        """The adapter's `mm_kwargs`."""
        return call.inputs

    @abstractmethod
    def maker(self, example: Any) -> Maker:
        """Returns a function that makes the fields and layers of a call from its encoded items."""


def is_pixels(value: Any, dims: int | None = None) -> TypeGuard[Tensor]:
    """Whether an input has pixels to encode: a tensor with data."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type != "meta"
        and value.numel() > 0
        and dims in (None, value.dim())
    )


def _kinds_of(example: Any) -> dict[str, type | None]:
    """The classes of an output's fields that hold several tensors, None for one tensor."""
    return {name: None if isinstance(value, Tensor) else type(value) for name, value in example.items()}


def _joined(parts: Iterable[tuple[Field, Tensor]], kinds: Mapping[str, type | None]) -> Made:
    """The fields of an output, each of its class of `_kinds_of`."""
    found: dict[str, Any] = {}
    for (name, _), part in parts:
        if kinds[name] is None:
            found[name] = part
        else:
            found.setdefault(name, []).append(part)
    return {name: own if (kind := kinds[name]) is None else kind(own) for name, own in found.items()}


def accepts(module: nn.Module, name: str) -> bool:
    """Whether a module's forward takes an argument, by its name or among any others."""
    parameters = inspect.signature(type(module).forward).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def twin_of(tower: nn.Module) -> nn.Module:
    """A linked copy in evaluation mode, whose output is no tuple; hooks run around what takes its place."""
    twin = linked_copy(tower)
    config: Any = copy.copy(twin.config)
    config.return_dict = True
    twin.config = config
    for module in twin.modules():
        vars(module)["training"] = False
    vars(twin)[OWN] = True
    for hooks in forward_hooks_of(twin):
        hooks.clear()
    remove_output_hooks(twin)
    return twin


# --- towers of patches and grids: the Qwen line, GLM and Kimi-K2.5; Pixtral


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

    def maker(self, example: Any) -> Maker:
        """Makes the fields of the output, which follow one another in the columns of an item."""
        adapter, kinds = self._adapter, _kinds_of(example)
        rows = adapter.min_item_tokens * adapter.rows_per_token
        places, values = zip(*packed_fields(example, rows, adapter.rows_per_token), strict=True)
        parts: list[tuple[slice, tuple[int, ...]]] = []
        start = 0
        for value in values:
            end = start + value.numel() // adapter.min_item_tokens
            is_batch = value.dim() > 2 and value.shape[0] == 1
            shape = (1, -1, *value.shape[2:]) if is_batch else (-1, *value.shape[1:])
            parts.append((slice(start, end), shape))
            start = end

        def make(call: Call, items: Sequence[Tensor]) -> Made:
            made = (torch.cat([item[:, columns] for item in items]).view(shape) for columns, shape in parts)
            return _joined(zip(places, made, strict=True), kinds)

        return make


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
        config = self.twin.config
        side = 2 * config.patch_size
        return {"pixel_values": zeros_for(self.twin, 1, config.num_channels, side, side)}

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
                call.inputs["pixel_values"].to(adapter.dtype), call.inputs["image_grid_thw"], strict=True
            )
        ]
        return {**call.inputs, "pixel_values": patches}

    def maker(self, example: Any) -> Maker:
        """Makes the layers, whose columns follow one another, (1, patches, hidden_size) each."""
        width = example.last_hidden_state.shape[-1]
        last, layers = self.num_states - 1, self.captured_layers

        def make(call: Call, items: Sequence[Tensor]) -> Made:
            states: Made = {
                layer: torch.cat([item[:, number * width : (number + 1) * width] for item in items])[None]
                for number, layer in enumerate(layers)
            }
            return {**states, "last_hidden_state": states[last]} if last in states else states

        return make


# --- towers of images of one size: CLIP, SigLIP, DINO, InternVL's, and, by a rule, those without a name

STATES = "hidden_states"
_INTERPOLATES = "interpolate_pos_encoding"
OUTPUT = ("last_hidden_state", "pooler_output")
"""Fields that a model is assumed to read of a tower, before others are known."""


class DenseKey(NamedTuple):
    """Channels, height and width of an image, and whether positions are interpolated for this size."""

    shape: tuple[int, ...]
    interpolates: bool = False


class DenseCalls(Calls):
    """Calls with (images, channels, height, width). Every size is captured for itself."""

    input_names: Sequence[str] = ("pixel_values",)
    makes_layers = True
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

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The images."""
        pixels = given.get(self.input_names[0])
        interpolates = bool(options.get(_INTERPOLATES))
        if options.keys() - {_INTERPOLATES}:
            return MissReason.OPTIONS
        if not is_pixels(pixels, 4):
            return MissReason.UNSUPPORTED_INPUT
        key = DenseKey(tuple(pixels.shape[1:]), interpolates)
        if not self.takes(key, pixels.dtype):
            return MissReason.UNSUPPORTED_INPUT
        return Call({self.input_names[0]: pixels}, key)

    def takes(self, key: DenseKey, dtype: torch.dtype) -> bool:
        """Whether images of this size and dtype are captured."""
        return True

    def example(self, key: Any) -> dict[str, Any]:
        """One image of zeros."""
        return {self.input_names[0]: zeros_for(self.twin, 1, *key.shape), **self._options(key)}

    def _options(self, key: DenseKey) -> dict[str, Any]:
        options = {_INTERPOLATES: True} if key.interpolates else {}
        return {**options, "output_hidden_states": True} if self.layers else options

    def adapter(self, key: Any, example: Any) -> Any:
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
        return wrap(self.twin, spec)

    def plain_fields(self, example: Any) -> list[Field]:
        """The tensors of an output that nothing was asked of."""
        return [(name, None) for name in OUTPUT if example.get(name) is not None]

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

    def maker(self, example: Any) -> Maker:
        """Makes every field, in memory of its own."""
        names, kinds = self.captured(example), _kinds_of(example)
        shapes = [field_of(example, name).shape[1:] for name in names]
        sizes = [shape.numel() for shape in shapes]
        end, pixels = sum(sizes), self.input_names[0]

        def make(call: Call, items: Sequence[Tensor]) -> Made:
            rows = items[0] if len(items) == 1 else torch.cat(list(items))
            count = call.inputs[pixels].shape[0]
            parts = rows.view(count, -1)[:, :end].split_with_sizes(sizes, dim=1)
            made = zip(names, parts, shapes, strict=True)
            own = {name: part.reshape(count, *shape).contiguous() for name, part, shape in made}
            layers: Made = {n: own.pop((STATES, n)) for n in self.layers if (STATES, n) in own}
            return {**_joined(own.items(), kinds), **layers}

        return make


# --- towers of tiles with adapters of their own


class Llama4Calls(DenseCalls):
    """Llama 4's tower, which takes one size and is wrapped by an adapter of its own."""

    makes_layers = False

    def takes(self, key: DenseKey, dtype: torch.dtype) -> bool:
        """Whether it is the configuration's size."""
        return key == self.example_key

    def adapter(self, key: Any, example: Any) -> Any:
        """The adapter of the class, which computes without complex numbers."""
        return wrap(self.twin)


class Step3p7Calls(DenseCalls):
    """Step-3.7's tower, called with whole images, and with crops of another size."""

    makes_layers = False

    @property
    def expected_keys(self) -> Sequence[DenseKey]:
        """Both sizes."""
        whole = self.example_key
        return whole, DenseKey((whole.shape[0], CROP_SIZE, CROP_SIZE))

    def takes(self, key: DenseKey, dtype: torch.dtype) -> bool:
        """Whether tiles are square."""
        _, height, width = key.shape
        return height == width and not key.interpolates

    def adapter(self, key: Any, example: Any) -> Any:
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

    def adapter(self, key: Any, example: Any) -> Any:
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
        config = self.twin.config
        pixels = zeros_for(self.twin, 1, patches, config.num_channels * config.patch_size**2)
        return {
            "pixel_values": pixels,
            "pixel_attention_mask": torch.ones(1, patches, dtype=torch.int64, device=pixels.device),
            "spatial_shapes": torch.tensor([[1, patches]], device="cpu"),
        }

    def adapter(self, key: Any, example: Any) -> Any:
        """The adapter of the class, for so many patches."""
        return Siglip2Tower(self.twin, key.shape[0])

    def inputs(self, call: Call, adapter: Any) -> dict[str, Any]:
        """The images with their positions."""
        pixels, mask, shapes = (call.inputs[name] for name in self.input_names)
        with torch.inference_mode(False):
            images = siglip2_tiles(pixels, mask, shapes, adapter.tower.embeddings.patch_embedding.weight)
        return super().inputs(Call({"pixel_values": images}), adapter)

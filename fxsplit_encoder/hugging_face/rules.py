"""Which calls serve a tower: those of its class by name, the grid rule of `towers.rules`, or the dense rule.

The dense rule serves a module of transformers that takes images of one size and returns tensors with a row
for each image. What it returns is read from calls with tensors without data, at one and at two images; before
a size is captured, calls with values show that no image reads another.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxsplit_encoder._torch.dispatch import RandomDraws
from fxsplit_encoder._torch.tensors import FakeTensorMode
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import UnsupportedTowerError
from fxsplit_encoder.hugging_face.calls import (
    STATES,
    Calls,
    DenseCalls,
    DenseKey,
    GridCalls,
    Idefics3Calls,
    Llama4Calls,
    PixtralCalls,
    Reads,
    Siglip2Calls,
    Step3p7Calls,
    accepts,
    twin_of,
)
from fxsplit_encoder.towers.registry import QWEN3, QWEN25
from fxsplit_encoder.towers.rules import (
    MODEL_ERRORS,
    Field,
    GridLook,
    arguments_of,
    check_difference,
    field_of,
    grid_argument,
    is_model,
    look_at_grids,
    zeros_for,
)

_OPTIONS = frozenset(
    {
        *("attention_mask", "bool_masked_pos", "dataset_index", "head_mask", "image_grid_hw", "noise"),
        *("interpolate_pos_encoding", "output_attentions", "output_hidden_states", "return_dict"),
        "patch_offsets",
    }
)
"""Arguments beside the images without which a tower is called, as without `labels` and those that are off."""

_USUAL_SIZE = 224
"""Pixels per side of the images that a tower is looked at with if its configuration has no size."""


def takes_images(module: nn.Module) -> bool:
    """Whether the first argument of a model of transformers, or of a module in it with a configuration, are
    images or their patches.
    """
    # The classes inside a tower inherit the name; Florence-2's tower calls its images hidden states.
    is_main = getattr(module, "main_input_name", "") == "pixel_values" and bool(arguments_of(module))
    return names_images(module) or (is_main and is_model(module))


def names_images(module: nn.Module) -> bool:
    """Whether the first argument has the name of images, or another that of grids."""
    is_first = next(iter(arguments_of(module)), "").startswith("pixel_values")
    return (is_first and hasattr(module, "config")) or grid_argument(module) is not None


@dataclass(frozen=True)
class Look:
    """Outputs of a tower for images of one shape."""

    input_name: str
    key: DenseKey
    is_configured: bool
    """Whether the shape is the configuration's."""
    fields: Mapping[str, Any]
    """Of the output for one image, without data."""
    states: Mapping[str, Any]
    """Of a call with `output_hidden_states`; empty if the tower does not take it."""


def look_at(tower: nn.Module) -> Look:
    """Calls a tower without data, at one and at two images; UnsupportedTowerError says what it is not."""
    name, *others = defaults = arguments_of(tower)
    others = [n for n in others if not (n in _OPTIONS or n.endswith("labels") or defaults[n] is False)]
    if others:
        raise UnsupportedTowerError(f"its forward also takes {', '.join(others)}")
    if not any(True for _ in tower.parameters()):
        raise UnsupportedTowerError("it has no parameters")
    shape, is_configured = _image_shape(tower)
    twin = twin_of(tower)
    one, two = (_fields(twin, shape, count) for count in (1, 2))
    _check_rows(one, two)
    states: Mapping[str, Any] = {}
    if STATES not in one and accepts(twin, "output_hidden_states"):
        states = _fields(twin, shape, 1, output_hidden_states=True)
        if not isinstance(states.get(STATES, ()), tuple):
            raise UnsupportedTowerError("its hidden states are no tuple")
    return Look(name, DenseKey(shape), is_configured, one, states)


def _image_shape(tower: nn.Module) -> tuple[tuple[int, ...], bool]:
    """Channels, height and width of an image, and whether the configuration has the size."""
    convolution = next((module for module in tower.modules() if isinstance(module, nn.Conv2d)), None)
    config: Any = tower.config
    configs = [config, *(getattr(config, name, None) for name in ("backbone_config", "vision_config"))]
    size = next((size for each in configs if (size := getattr(each, "image_size", None))), None)
    channels = next((count for each in configs if (count := getattr(each, "num_channels", None))), 3)
    if convolution is not None:
        channels = convolution.in_channels
    height, width = (size, size) if isinstance(size, int) else size or (_USUAL_SIZE, _USUAL_SIZE)
    return (channels, height, width), size is not None


def _fields(twin: nn.Module, shape: Sequence[int], count: int, **options: Any) -> dict[str, Any]:
    """The output for so many images without data, as tensors and tuples of tensors by their names."""
    parameter = next(twin.parameters())
    dtype = parameter.dtype
    draws = RandomDraws()
    try:
        with torch.inference_mode(False), torch.no_grad():
            try:  # a third of the time of fake tensors, which also take constants that are no buffers
                own = itertools.chain(twin.named_parameters(), twin.named_buffers())
                tensors = {name: tensor.detach().to("meta") for name, tensor in own}
                pixels = torch.empty(count, *shape, dtype=dtype, device="meta")
                with draws:
                    output = torch.func.functional_call(twin, tensors, (pixels,), options)
            except MODEL_ERRORS:
                with FakeTensorMode(allow_non_fake_inputs=True), draws:
                    pixels = torch.empty(count, *shape, dtype=dtype, device=parameter.device)
                    output = twin(pixels, **options)
    except MODEL_ERRORS as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnsupportedTowerError(f"a call with images of {(count, *shape)} raises {what}") from error
    if draws.names:
        raise UnsupportedTowerError(f"it draws random numbers: {draws.names[0]}")
    if not hasattr(output, "to_tuple"):
        raise UnsupportedTowerError(f"it returns a {type(output).__name__}, not an output with fields")
    return dict(output.items())


def _check_rows(one: Mapping[str, Any], two: Mapping[str, Any]) -> None:
    """Raises UnsupportedTowerError unless every tensor has as many rows as there are images."""
    names = fields_of(one)
    if not names or names != fields_of(two):
        raise UnsupportedTowerError("its output has other fields for two images than for one")
    dtypes = {field_of(one, name).dtype for name in names}
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
        raise UnsupportedTowerError(
            f"its fields are of {', '.join(map(str, sorted(dtypes, key=str)))}; a capture has one dtype, of "
            "floating point numbers"
        )
    for name in names:
        shapes = [tuple(field_of(fields, name).shape) for fields in (one, two)]
        if not shapes[0] or shapes != [(1, *shapes[0][1:]), (2, *shapes[0][1:])]:
            raise UnsupportedTowerError(
                f"its {name[0]} has the shape {shapes[0]} for one image and {shapes[1]} for two, not a "
                "row an image"
            )


def fields_of(fields: Mapping[str, Any]) -> list[Field]:
    """The tensors of an output; UnsupportedTowerError where there is something else."""
    found: list[Field] = []
    for name, value in fields.items():
        entries = value if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(entry, torch.Tensor) for entry in entries):
            raise UnsupportedTowerError(f"its {name} is a {type(value).__name__}, not one of tensors")
        found += [(name, n if entries is value else None) for n in range(len(entries))]
    return found


class RuleCalls(DenseCalls):
    """Calls of a tower by the rule."""

    is_named = False

    def __init__(self, twin: nn.Module, reads: Reads, config: EncoderConfig, seen: Look) -> None:
        self._look = seen
        self.input_names = (self._look.input_name,)
        self._names = fields_of(self._look.fields)
        self.makes_layers = STATES in self._look.states
        self.with_states = frozenset(self._look.states).difference(self._look.fields)
        super().__init__(twin, reads, config)

    @property
    def num_states(self) -> int:
        """Hidden states that the tower returns."""
        return len(self._look.states[STATES])

    @property
    def example_key(self) -> DenseKey:
        """The size that the tower was looked at with, the configuration's if it has one."""
        return self._look.key

    @property
    def expected_keys(self) -> Sequence[DenseKey]:
        """This size, if it is the configuration's."""
        return (self.example_key,) if self._look.is_configured else ()

    def takes(self, key: DenseKey, dtype: torch.dtype) -> bool:
        """Whether the tower converts images of this dtype to its own."""
        return dtype == next(self.twin.parameters()).dtype or self._converts(dtype)

    def _converts(self, dtype: torch.dtype) -> bool:
        """Whether images of another dtype give an output of the same dtypes."""
        known: dict[torch.dtype, bool] = vars(self).setdefault("_converted", {})
        if dtype not in known:
            twin = twin_of(self.twin)
            pixels = zeros_for(twin, 1, *self.example_key.shape).to(dtype)
            own = field_of(self._look.fields, self._names[0]).dtype  # of all fields, see `_check_rows`
            try:  # with data: the meta device takes dtypes that kernels refuse
                with torch.inference_mode(False), torch.no_grad():
                    fields = dict(twin(pixels).items())
                known[dtype] = all(field_of(fields, name).dtype == own for name in self._names)
            except MODEL_ERRORS:
                known[dtype] = False
        return known[dtype]

    def plain_fields(self, example: Any) -> list[Field]:
        """Those that the tower returned when it was looked at."""
        return self._names

    def adapter(self, key: Any, example: Any) -> Any:
        """By a declaration, after two images, encoded together and each alone, have shown that it is true."""
        twin = twin_of(self.twin)
        adapter = super().adapter(key, example)
        spec = adapter.spec
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(2, *key.shape, generator=generator, dtype=torch.float32, device="cpu")
        pixels = pixels.to(adapter.device, adapter.dtype)
        with torch.inference_mode(False), torch.no_grad():
            both, *alone = (
                spec.features(twin(images, **spec.options)) for images in (pixels, pixels[:1], pixels[1:])
            )
            check_difference(both, torch.cat(alone), "another image of the batch")
            check_difference(both, adapter.features(pixels), "torch's own attention")
        return adapter


# --- classes of towers

_DENSE = (
    *("CLIPVisionModel", "CLIPVisionTransformer", "DINOv3ViTModel", "Dinov2Model"),
    *("Dinov2WithRegistersModel", "InternVLVisionModel", "SiglipVisionModel", "SiglipVisionTransformer"),
)
_GRID = (
    *("Glm4vMoeVisionModel", "Glm4vVisionModel", "Kimi_K25VisionModel"),
    *("Qwen2VisionTransformerPretrainedModel", *QWEN25, *QWEN3),
)
_CALLS: Mapping[str, type[Calls]] = {
    **dict.fromkeys(_DENSE, DenseCalls),
    **dict.fromkeys(_GRID, GridCalls),
    **dict.fromkeys(("Idefics3VisionTransformer", "SmolVLMVisionTransformer"), Idefics3Calls),
    "Llama4VisionModel": Llama4Calls,
    "PixtralVisionModel": PixtralCalls,
    **dict.fromkeys(("Siglip2VisionModel", "Siglip2VisionTransformer"), Siglip2Calls),
    "Step3p7VisionModel": Step3p7Calls,
}
"""By the names of towers' classes, of which none is imported before it is used."""


def is_named(module: nn.Module) -> bool:
    """Whether a module is of a class that `accelerate` serves by its name."""
    return any(kind.__name__ in _CALLS for kind in type(module).__mro__)


def calls_of(module: nn.Module) -> tuple[type[Calls], Look | GridLook | None]:
    """The class of `Calls` for a tower, and what a rule has seen of one without a name. UnsupportedTowerError
    says why no rule serves it.
    """
    for kind in type(module).__mro__:
        if kind.__name__ in _CALLS:
            return _CALLS[kind.__name__], None
    if grid_argument(module) is not None:
        return GridCalls, look_at_grids(module)
    return RuleCalls, look_at(module)

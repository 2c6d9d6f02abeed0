"""Towers of images of one size, declared by what they return: CLIP, SigLIP, DINO, InternVL's."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxsplit_encoder.integrations.hugging_face.calls import Call, Calls, Made, is_pixels
from fxsplit_encoder.planning import MissReason
from fxsplit_encoder.towers.dense import DenseTower
from fxsplit_encoder.towers.generic import DenseTowerSpec
from fxsplit_encoder.towers.registry import wrap

_INTERPOLATES = "interpolate_pos_encoding"


class DenseKey(NamedTuple):
    """What a capture of images is made for."""

    shape: tuple[int, ...]
    """Channels, height and width of an image."""
    interpolates: bool = False
    """Whether positions are interpolated for this size."""


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

    @property
    def default_key(self) -> DenseKey:
        """The size that the configuration names."""
        config = self.twin.config
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return DenseKey((config.num_channels, height, width))

    @property
    def expected_keys(self) -> Sequence[DenseKey]:
        """This size."""
        return (self.default_key,)

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The images."""
        pixels = given.get(self.input_names[0])
        interpolates = bool(options.get(_INTERPOLATES))
        if options.keys() - {_INTERPOLATES}:
            return MissReason.OPTIONS
        if not is_pixels(pixels, 4):
            return MissReason.UNSUPPORTED_INPUT
        assert isinstance(pixels, torch.Tensor)
        return Call({self.input_names[0]: pixels}, key=DenseKey(tuple(pixels.shape[1:]), interpolates))

    def example(self, key: Hashable) -> dict[str, Any]:
        """One image of zeros."""
        assert isinstance(key, DenseKey)
        parameter = next(self.twin.parameters())
        pixels = torch.zeros(1, *key.shape, device=parameter.device, dtype=parameter.dtype)
        return {self.input_names[0]: pixels, **self._options(key)}

    def _options(self, key: DenseKey) -> dict[str, Any]:
        options = {_INTERPOLATES: True} if key.interpolates else {}
        return {**options, "output_hidden_states": True} if self.layers else options

    def adapter(self, key: Hashable, example: Any) -> DenseTower:
        """By a declaration: the rows of every part follow one another for each image."""
        assert isinstance(key, DenseKey)
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
        """What is captured: the layers and fields that the model reads, or the tower's output, pooled too."""
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

"""Towers of tiles of one size that have an adapter of their own: those of Llama 4, Step-3.7, Idefics 3 and
SmolVLM.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from fxsplit_encoder._torch.tensors import linked_copy
from fxsplit_encoder.integrations.hugging_face.calls import Call
from fxsplit_encoder.integrations.hugging_face.dense_calls import DenseCalls, DenseKey
from fxsplit_encoder.planning import MissReason
from fxsplit_encoder.towers.dense import DenseTower
from fxsplit_encoder.towers.idefics3 import Idefics3Tower
from fxsplit_encoder.towers.registry import wrap
from fxsplit_encoder.towers.step3p7 import CROP_SIZE, Step3p7Tiles


class Llama4Calls(DenseCalls):
    """Llama 4's tower, which takes one size and is wrapped by an adapter of its own."""

    makes_layers = False

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The tiles."""
        call = super().read(given, options)
        if isinstance(call, Call) and call.key != self.default_key:
            return MissReason.UNSUPPORTED_INPUT
        return call

    def adapter(self, key: Hashable, example: Any) -> DenseTower:
        """The adapter of the class, which computes without complex numbers."""
        adapter = wrap(self.twin)
        assert isinstance(adapter, DenseTower)
        return adapter


class Step3p7Calls(DenseCalls):
    """Step-3.7's tower, which is called with whole images, and with crops of another size."""

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
            assert isinstance(call.key, DenseKey)
            _, height, width = call.key.shape
            if height != width or call.key.interpolates:
                return MissReason.UNSUPPORTED_INPUT
        return call

    def adapter(self, key: Hashable, example: Any) -> DenseTower:
        """The adapter of the class, for tiles of this size. It puts its tables among the modules that it
        wraps, where those of the other size would take their place: each size has modules of its own.
        """
        assert isinstance(key, DenseKey)
        return Step3p7Tiles(linked_copy(self.twin), key.shape[-1])


class Idefics3Calls(DenseCalls):
    """Idefics 3's and SmolVLM's tower. Images with padding have positions and a mask of their own: they go to
    the tower itself.
    """

    input_names = ("pixel_values", "patch_attention_mask")

    def read(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Call | MissReason:
        """The images, if all are whole."""
        mask = given.get("patch_attention_mask")
        if isinstance(mask, torch.Tensor) and not bool(mask.all()):
            return MissReason.UNSUPPORTED_INPUT
        return super().read(given, options)

    def adapter(self, key: Hashable, example: Any) -> DenseTower:
        """The adapter of the class, for images of this size."""
        assert isinstance(key, DenseKey)
        layers = [part.layer for part in self.parts(example)]
        _, height, width = key.shape
        return Idefics3Tower(self.twin, height, width, layers)

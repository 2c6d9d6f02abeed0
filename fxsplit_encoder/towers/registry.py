"""Wraps a tower by the adapter of its class, or by a `DenseTowerSpec`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.transformers import install_output_hooks
from fxsplit_encoder.errors import InputError, MissingExtraError, UnsupportedTowerError
from fxsplit_encoder.messages import shown
from fxsplit_encoder.towers.base import is_hugging_face
from fxsplit_encoder.towers.packed import PackedTower
from fxsplit_encoder.towers.rules import GridTower, grid_argument
from fxsplit_encoder.towers.tiles import DenseTower, TiledTower, View


@dataclass(frozen=True)
class DenseTowerSpec:
    """Declares a module for `wrap(module, spec)` that encodes a batch of images of one size, or of audio of
    one length. Attention of Hugging Face modules is set to "sdpa"; others are split at torch's
    `scaled_dot_product_attention`.
    """

    image_shape: tuple[int, ...]
    """Channels, height and width of an image; mel bins and frames of a piece of audio."""
    tokens_per_image: int
    """Rows of output that an image gives, without those that `rows` drops."""
    hidden_size: int
    """Columns of the output."""
    output: str | Callable[[Any], torch.Tensor] = "last_hidden_state"
    """The features (images, rows, hidden_size) of the module's output: an attribute, or a function of it."""
    rows: slice = field(default_factory=lambda: slice(None))
    """The rows of each image's features that are kept: `slice(1, None)` drops a class token."""
    input_name: str = "pixel_values"
    """The images' key in `mm_kwargs`, and the name of the module's first argument."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the module's forward, such as `{"output_hidden_states": True}`."""
    attends_with_mask: bool = False
    """Whether attention gets a mask or a bias of each image's own. Behind `torch.compile` a single image is
    then traced apart on torch before 2.13, which fails without this."""
    modality: Literal["image", "audio"] = "image"
    declares_padding: bool = True
    """Whether images are declared to be encoded one by one; else a batch is padded if a proof says so."""
    has_plain_blocks: bool = False
    """Whether every block in a `ModuleList` takes tensors, numbers and names alone and returns one tensor.
    `torch.compile` then traces one of the equal ones for all."""

    def features(self, result: Any) -> Tensor:
        """Returns the features that the module's output has, (images, rows, hidden_size)."""
        features: Tensor = self.output(result) if callable(self.output) else getattr(result, self.output)
        return features[:, self.rows]

    def __post_init__(self) -> None:
        dimensions = {"image": 3, "audio": 2}.get(self.modality)
        if dimensions is None:
            raise InputError(f"DenseTowerSpec.modality: expected image or audio; got {shown(self.modality)}")
        sizes = (*self.image_shape, self.tokens_per_image, self.hidden_size)
        if len(self.image_shape) != dimensions or min(sizes) < 1:
            raise InputError(
                f"DenseTowerSpec: expected positive numbers, {dimensions} of them in image_shape; got "
                f"{self.image_shape}, {self.tokens_per_image} and {self.hidden_size}"
            )


class GenericTower(DenseTower):
    """Wraps a module by its `DenseTowerSpec`; called, it is that module."""

    def __init__(self, tower: nn.Module, spec: DenseTowerSpec) -> None:
        view = View(spec.input_name, spec.image_shape, spec.tokens_per_image)
        super().__init__(tower, view, spec.hidden_size)
        self.spec = spec
        self.modalities = (spec.modality,)
        self.declares_padding = spec.declares_padding
        self.attends_with_mask = spec.attends_with_mask
        self.has_plain_blocks = spec.has_plain_blocks
        if is_hugging_face(tower):
            from fxsplit_encoder.kernels.attention.hugging_face import use_dense_attention

            use_dense_attention(tower)
            install_output_hooks(tower)

    def features(self, tiles: Tensor) -> Tensor:
        """The features by the spec's `output`, `options` and `rows`."""
        return self.spec.features(self.tower(tiles, **self.spec.options))


# The file and the adapter of a tower's class, by name: a model family is imported when it is used.
QWEN25 = ("Exaone4_5_VisionModel", "Qwen2_5OmniVisionEncoder", "Qwen2_5_VisionTransformerPretrainedModel")
QWEN3 = ("Qwen3_5MoeVisionModel", "Qwen3_5VisionModel", "Qwen3VLMoeVisionModel", "Qwen3VLVisionModel")
_ADAPTERS = {
    "DeepseekOcrVisionModel": ("cropped", "DeepseekOcrTower"),
    **dict.fromkeys(("Glm4vMoeVisionModel", "Glm4vVisionModel"), ("qwen_vl", "Glm4vTower")),
    **dict.fromkeys(("InternVLForConditionalGeneration", "InternVLModel"), ("dense", "InternVLTower")),
    "KimiVLVisionModel": ("kimi", "KimiVLTower"),
    "Kimi_K25VisionModel": ("kimi", "KimiK25Tower"),
    **dict.fromkeys(("Llama4ForConditionalGeneration", "Llama4VisionModel"), ("dense", "Llama4Tower")),
    "Qwen2VisionTransformerPretrainedModel": ("qwen_vl", "Qwen2VLTower"),
    **dict.fromkeys(QWEN25, ("qwen_vl", "Qwen25VLTower")),
    **dict.fromkeys(QWEN3, ("qwen_vl", "Qwen3VLTower")),
    "Step3VisionModel": ("cropped", "Step3VLTower"),
    **dict.fromkeys(("Step3p7Model", "Step3p7VisionModel"), ("cropped", "Step3p7Tower")),
}


def supported_towers() -> list[str]:
    """The class names of the towers that `wrap` takes."""
    return sorted(_ADAPTERS)


def wrap(tower: nn.Module, spec: DenseTowerSpec | None = None) -> PackedTower | DenseTower | TiledTower:
    """Adapts a vision tower to the manager's protocol, as a module with the tower's own forward. The tower is
    not copied: its attention is set to `fxsplit::varlen_attention`, in a dense one to torch's
    `scaled_dot_product_attention`.

    Args:
        tower: a tower that `supported_towers` names; where the connector belongs to the model, the model.
        spec: declares any other module that encodes a batch of images of one size.

    Raises:
        UnsupportedTowerError: no adapter knows this class.
        MissingExtraError: transformers is not installed.
    """
    if spec is not None:
        return GenericTower(tower, spec)
    name = next((c.__name__ for c in type(tower).__mro__ if c.__name__ in _ADAPTERS), None)
    if name is None and grid_argument(tower) is not None:
        return GridTower(tower)
    if name is None:
        raise UnsupportedTowerError(
            f"wrap: no adapter for {type(tower).__name__}; expected one of {', '.join(supported_towers())} "
            "(pass the vision tower itself, such as model.visual). Declare a module that encodes a batch of "
            "images of one size by wrap(module, DenseTowerSpec(...)), and derive the adapter of one that "
            "packs patches from PackedTower; torch.compile(module, backend='encoder_cg') needs no adapter"
        )
    module_name, class_name = _ADAPTERS[name]
    try:
        module = importlib.import_module(f"fxsplit_encoder.towers.{module_name}")
        adapter: PackedTower | DenseTower | TiledTower = getattr(module, class_name)(tower)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingExtraError("wrap", "hf") from error
    return adapter

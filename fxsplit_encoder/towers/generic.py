"""Any dense tower, by a declaration instead of an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.transformers import install_output_hooks
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import shown
from fxsplit_encoder.towers.base import is_hugging_face
from fxsplit_encoder.towers.dense import DenseTower


@dataclass(frozen=True)
class DenseTowerSpec:
    """What `wrap(module, spec)` must know of a module that encodes a batch of images of one size, or of audio
    of one length. Attention of Hugging Face modules is set to "sdpa"; others are split at torch's
    `scaled_dot_product_attention`.
    """

    image_shape: tuple[int, ...]
    """Channels, height and width of an image; mel bins and frames of a piece of audio."""

    tokens_per_image: int
    """Rows of output that an image gives, without those that `rows` drops."""

    hidden_size: int
    """Columns of the output."""

    output: str | Callable[[Any], torch.Tensor] = "last_hidden_state"
    """Where the features (images, rows, hidden_size) are in what the module returns: an attribute's name, or
    a function of it.
    """

    rows: slice = field(default_factory=lambda: slice(None))
    """The rows of each image's features that are kept: `slice(1, None)` drops a class token."""

    input_name: str = "pixel_values"
    """The images' key in `mm_kwargs`, and the name of the module's first argument."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the module's forward, such as `{"output_hidden_states": True}`."""

    attends_with_mask: bool = False
    """Whether attention gets a mask or a bias of each image's own. Behind `torch.compile` a single image is
    then traced apart on torch before 2.13, which fails without this.
    """

    modality: Literal["image", "audio"] = "image"
    """What an image is, if not one."""

    has_plain_blocks: bool = False
    """Whether every block in a `ModuleList` takes tensors, numbers and names alone and returns one tensor.
    `torch.compile` traces one of the equal ones for all then.
    """

    def __post_init__(self) -> None:
        sizes = {
            "image_shape": self.image_shape,
            "tokens_per_image": self.tokens_per_image,
            "hidden_size": self.hidden_size,
        }
        dimensions = {"image": 3, "audio": 2}.get(self.modality)
        if dimensions is None:
            raise InputError(f"DenseTowerSpec.modality: expected image or audio; got {shown(self.modality)}")
        for name, value in sizes.items():
            numbers = value if isinstance(value, tuple) else (value,)
            if any(number < 1 for number in numbers) or (
                name == "image_shape" and len(numbers) != dimensions
            ):
                raise InputError(
                    f"DenseTowerSpec.{name}: expected positive sizes, for an image three, for audio two; got "
                    f"{value}"
                )


class GenericTower(DenseTower):
    """Wraps a module by its `DenseTowerSpec`; called, it is that module."""

    def __init__(self, tower: nn.Module, spec: DenseTowerSpec) -> None:
        super().__init__(
            tower,
            tile_shape=spec.image_shape,
            tokens_per_tile=spec.tokens_per_image,
            out_hidden_size=spec.hidden_size,
            input_name=spec.input_name,
        )
        self.spec = spec
        self.modalities = (spec.modality,)  # type: ignore[misc]  # of the class elsewhere
        self.declares_padding = True  # a spec says that images are encoded one by one
        self.attends_with_mask = spec.attends_with_mask
        self.has_plain_blocks = spec.has_plain_blocks
        _prepare_hugging_face(tower)

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        """What the spec says."""
        return self.spec.modality

    def features(self, tiles: Tensor) -> Tensor:
        """The features that the spec points at."""
        result = self.tower(tiles, **self.spec.options)
        output = self.spec.output
        features: Tensor = output(result) if callable(output) else getattr(result, output)
        return features[:, self.spec.rows]


def _prepare_hugging_face(tower: nn.Module) -> None:
    """Chooses attention where a module is Hugging Face's."""
    if is_hugging_face(tower):
        from fxsplit_encoder.kernels.attention.hugging_face import use_dense_attention

        use_dense_attention(tower)
        install_output_hooks(tower)

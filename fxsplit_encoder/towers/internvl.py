"""InternVL's vision tower with pixel shuffle and projector, which the model applies around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fxsplit_encoder._torch.transformers import install_output_hooks
from fxsplit_encoder.kernels.attention.hugging_face import use_dense_attention
from fxsplit_encoder.towers.base import with_own_attention
from fxsplit_encoder.towers.tiles import DenseTower

_CONFIGURED = ("vision_feature_layer", "vision_feature_select_strategy")


class InternVLTower(DenseTower):
    """Wraps what surrounds the language model in `InternVLModel`; called, it is `get_image_features`.

    A frame of a video is a tile. An item's embedding is (256 * tiles, text hidden size) with 448 x 448 tiles.
    """

    model: Any
    modalities: Sequence[str] = ("image", "video")
    has_plain_blocks = True

    def __init__(self, model: nn.Module) -> None:
        inner: Any = getattr(model, "model", model)  # of InternVLForConditionalGeneration
        config = inner.config
        height, width = config.vision_config.image_size
        patch_height, patch_width = config.vision_config.patch_size
        super().__init__(
            inner.vision_tower,
            tile_shape=(config.vision_config.num_channels, height, width),
            tokens_per_tile=int(
                (height // patch_height) * (width // patch_width) * config.downsample_ratio**2
            ),
            out_hidden_size=config.text_config.hidden_size,
            children={name: getattr(inner, name) for name in ("vision_tower", "multi_modal_projector")},
        )
        # Not a submodule: the language model's parameters are none of this module's.
        object.__setattr__(self, "model", inner)
        use_dense_attention(inner.vision_tower)
        # Here rather than in the first forward, which would take a lock that Dynamo does not trace: from
        # transformers 5.23 on every forward looks for them, whatever layer it returns.
        install_output_hooks(inner.vision_tower)

    def matters(self, option: str, value: Any) -> bool:
        """Whether an option changes what the model returns: not one that says what its configuration does."""
        if option in _CONFIGURED:
            return value not in (None, getattr(self.model.config, option))
        return super().matters(option, value)

    def call(self, tiles: Tensor) -> Any:
        """`InternVLModel.get_image_features`."""
        # By the class, so that a model whose method was replaced by this module does not call itself.
        return type(self.model).get_image_features(self.model, tiles)

    def call_tower(self, *args: Any, **kwargs: Any) -> Any:
        """The same with the model's own options and attention."""
        model: Any = with_own_attention(self.model)
        return type(model).get_image_features(model, *args, **kwargs)

    def features(self, tiles: Tensor) -> Tensor:
        """The projected features, by the layer and the strategy that the configuration names."""
        features: Tensor = self.call(tiles).pooler_output
        return features

"""From what a checkpoint's config.json holds to the module that `wrap` takes, without its weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Settings = Mapping[str, Any]
"""What a config.json holds: of a whole model, or of its vision tower alone."""

Build = Callable[[Settings], nn.Module]

# The language model is nobody's concern here: one block, as narrow as its configuration allows, and dropped.
_TEXT = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def vision_settings(settings: Settings) -> dict[str, Any]:
    """The vision tower's own part."""
    vision = dict(settings.get("vision_config", settings))
    vision.pop("model_type", None)
    return vision


def text_width(settings: Settings) -> int:
    """The width of the language model, in which a projector writes."""
    width: int = settings["text_config"]["hidden_size"]
    return width


def hugging_face(module: str, tower: str, config: str) -> Build:
    """Builds a vision tower that transformers has.

    Args:
        module: under `transformers.models`; imported when a tower is built.
        tower: the tower's class.
        config: the class of its configuration.
    """

    def build(settings: Settings) -> nn.Module:
        made: nn.Module = _load(module, "modeling", tower)(
            _load(module, "configuration", config)(**vision_settings(settings))
        )
        return made

    return build


def build_internvl(settings: Settings) -> nn.Module:
    """`InternVLModel` without its language model."""
    text = {**_TEXT, **_NO_TOKENS, "model_type": "qwen2", "intermediate_size": 8}
    config = _load("internvl", "configuration", "InternVLConfig")(
        vision_config=vision_settings(settings),
        text_config={**text, "hidden_size": text_width(settings)},
        **_taken(settings, "downsample_ratio", "projector_hidden_act"),
        **_taken(settings, "vision_feature_layer", "vision_feature_select_strategy"),
    )
    return _without_language_model(_load("internvl", "modeling", "InternVLModel")(config))


def build_llama4(settings: Settings) -> nn.Module:
    """`Llama4ForConditionalGeneration` without its language model."""
    moe = {"intermediate_size": 8, "intermediate_size_mlp": 8, "num_local_experts": 1, "head_dim": 8}
    config = _load("llama4", "configuration", "Llama4Config")(
        vision_config=vision_settings(settings),
        text_config={**_TEXT, **moe, "pad_token_id": 0, "hidden_size": text_width(settings)},
    )
    return _without_language_model(_load("llama4", "modeling", "Llama4ForConditionalGeneration")(config))


def build_step3p7(settings: Settings) -> nn.Module:
    """`Step3p7Model` without its language model."""
    narrow = {"intermediate_size": 8, "head_dim": 8, "moe_layers_enum": [], "pad_token_id": 0}
    text = {**_TEXT, **narrow, "hidden_size": text_width(settings)}
    config = _load("step3p7", "configuration", "Step3p7Config")(
        vision_config=vision_settings(settings), text_config=text, **_taken(settings, "projector_bias")
    )
    return _without_language_model(_load("step3p7", "modeling", "Step3p7Model")(config))


def build_kimi_vl(settings: Settings) -> nn.Module:
    """Ours, with the projector."""
    from fxsplit_encoder.modules.moonvit import KimiVLVisionConfig, KimiVLVisionModel

    return KimiVLVisionModel(KimiVLVisionConfig.from_checkpoint(settings))


def build_step3(settings: Settings) -> nn.Module:
    """Ours; config.json has the names of the encoder's configuration in serving engines."""
    from fxsplit_encoder.modules.step3_vision import Step3VisionConfig, Step3VisionModel

    names = {
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "mlp_size": "intermediate_size",
        "downsample_channels": "output_hidden_size",
    }
    vision = vision_settings(settings)
    same = ("hidden_size", "image_size", "patch_size", "layer_norm_eps")
    renamed = {own: vision[name] for own, name in names.items() if name in vision}
    sizes = {**_taken(vision, *same), **renamed, **_taken(settings, "projector_bias")}
    return Step3VisionModel(Step3VisionConfig(**sizes, out_hidden_size=text_width(settings)))


def build_deepseek_ocr(settings: Settings) -> nn.Module:
    """Ours; config.json lists both encoders under `vision_config.width`.

    `base_size` and `image_size`, arguments of the published model's `infer`, are read beside `vision_config`,
    whose own `image_size` is the size that SAM's positions are stored for.
    """
    from fxsplit_encoder.modules.clip_encoder import ClipConfig
    from fxsplit_encoder.modules.deepseek_encoder import DeepseekOcrConfig, DeepseekOcrVisionModel
    from fxsplit_encoder.modules.sam import SamConfig

    encoders = vision_settings(settings).get("width", {})
    clip, sam = encoders.get("clip-l-14-224", {}), encoders.get("sam_vit_b", {})
    channels = sam.get("downsample_channels", SamConfig.downsample_channels)
    projector = settings.get("projector_config", {})
    return DeepseekOcrVisionModel(
        DeepseekOcrConfig(
            **_taken(settings, "base_size", "image_size"),
            out_hidden_size=projector.get("n_embed", DeepseekOcrConfig.out_hidden_size),
            sam=SamConfig(
                **_transformer_sizes(sam),
                global_layers=tuple(sam.get("global_attn_indexes", SamConfig.global_layers)),
                downsample_channels=(channels[0], channels[1]),
            ),
            clip=ClipConfig(**_transformer_sizes(clip), **_taken(clip, "image_size", "patch_size")),
        )
    )


def _transformer_sizes(encoder: Settings) -> dict[str, Any]:
    sizes = {"num_layers": "layers", "num_heads": "heads", "hidden_size": "width"}
    given = {own: encoder[name] for own, name in sizes.items() if name in encoder}
    # In both encoders an MLP is four times as wide as a block.
    return {**given, **({"mlp_size": 4 * given["hidden_size"]} if "hidden_size" in given else {})}


def _taken(settings: Settings, *names: str) -> dict[str, Any]:
    return {name: settings[name] for name in names if name in settings}


def _without_language_model(model: Any) -> nn.Module:
    model.language_model = nn.Identity()
    return model  # type: ignore[no-any-return]


def _load(module: str, kind: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{module}.{kind}_{module}"), name)

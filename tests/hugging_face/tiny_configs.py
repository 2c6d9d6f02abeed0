"""Every auto class of transformers with images, and the smallest configuration of each: its own, with
widths, layers and images made small by the names of its settings, and what `classes.json` says of a kind.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

KINDS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("classes.json").read_text())
"""By `model_type`, of a model or of a part: settings whose sizes depend on one another."""

WIDTH, HEADS, LAYERS, VOCABULARY, SIDE = 64, 4, 2, 512, 64

_LAYERS = re.compile(r"layers?$|depth$|blocks$")
_WIDTHS = re.compile(
    r"(hidden|embed|model|ffn|mlp|proj|inter|out|text|vision|width|feature|fusion|resampler|query|encoder"
    r"|decoder|neck|head|q_lora|kv_lora)[a-z_]*(size|dim|dims|width|model|channels|rank)$"
    r"|^(dim|width|d_model|d_ff|n_embd|n_inner|input_dim)$"
)
_OTHERS = re.compile(
    r"patch_size|kernel|window|merge_size|stride|crop|tile_size|scale|ratio|sample_size|num_|max_|pad|token"
    r"|stem|pool|factor|offset|grid|bucket|codebook|frame|chunk|tubelet|temporal|rotary|rope"
)
"""Sizes that are no widths."""

_MOST = {
    r"vocab_size": VOCABULARY,
    r"heads$|^n_head$": HEADS,
    r"^(global_)?head_dim$": WIDTH // HEADS,
    r"experts$|^num_queries$|^num_query_tokens$": 4,
    r"experts_per_tok$": 2,
}

_BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 32, 64],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}
"""In place of one that is not transformers' own."""


@functools.cache
def model_types() -> dict[str, str]:
    """The classes of the auto mappings, and a `model_type` of each."""
    found: dict[str, str] = {}
    for mapping in sorted(name for name in vars(modeling_auto) if name.endswith("_MAPPING_NAMES")):
        for kind, names in getattr(modeling_auto, mapping).items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, kind)
    return found


def auto_classes() -> list[str]:
    """Those that take images or their patches; looks at all, which takes a minute."""
    return [name for name in sorted(filter(None, model_types())) if _takes_images(name)]


def _takes_images(name: str) -> bool:
    kind: Any = getattr(transformers, name, None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model:
        return False
    arguments = inspect.signature(kind.forward).parameters
    is_named = any(each.startswith("pixel_values") or each.endswith("grid_thw") for each in arguments)
    return is_named or str(kind.main_input_name).startswith("pixel_values")


def config_of(name: str) -> Any:
    """The smallest configuration of a class."""
    kind: Any = getattr(transformers, name)
    config: Any = kind.config_class or getattr(transformers, CONFIG_MAPPING_NAMES[model_types()[name]])
    return config(**shrunk(config().to_dict()))


def shrunk(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a configuration, those of its parts inside, with small sizes."""
    if sizes.get("model_type") == "timm_backbone":
        return dict(_BACKBONE)
    sizes = {name: value for name, value in sizes.items() if name not in ("dtype", "transformers_version")}
    layers = LAYERS
    if "stage_names" in sizes and "depths" not in sizes and "hidden_sizes" not in sizes:
        stages = len(sizes.get("out_features") or [""])
        layers = max(LAYERS, stages)
        sizes["out_features"] = [f"stage{layers - stages + n + 1}" for n in range(stages)]
        del sizes["stage_names"], sizes["out_indices"]
    if sizes.get("use_timm_backbone"):
        sizes.update(use_timm_backbone=False, backbone=None)
    counts = {value for name, value in sizes.items() if _LAYERS.search(name) and _is_count(value)}
    lengths = counts - {len(sizes.get("depths") or ())}
    small: dict[str, Any] = {}
    for name, value in sizes.items():
        if isinstance(value, Mapping):
            small[name] = _of_part(name, value)
        elif isinstance(value, list | tuple):
            small[name] = _of_list(name, list(value), lengths, layers)
        elif _is_count(value):
            small[name] = _of_number(name, value, sizes, layers)
        else:
            small[name] = value
    return _merged(small, KINDS.get(str(sizes.get("model_type")), {}))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _of_part(name: str, value: Mapping[Any, Any]) -> dict[Any, Any]:
    if "per_layer" in name:
        return {layer: part for layer, part in value.items() if int(layer) < LAYERS}
    if "config" in name or "model_type" in value:
        return shrunk(value)
    return {**value, "mrope_section": [2, 3, 3]} if "mrope_section" in value else dict(value)


def _of_number(name: str, value: int, sizes: Mapping[str, Any], layers: int) -> int:
    stages = sizes.get("depths") or range(sizes.get("num_encoder_blocks") or 0)
    if _LAYERS.search(name):
        return value if value == len(stages) else min(value, layers)
    if re.search(r"(kv|key_value)_heads", name) and value != sizes.get("num_attention_heads"):
        return min(value, HEADS // 2)
    if re.search(r"token_id|token_index|_id$", name) and value >= VOCABULARY:
        return VOCABULARY - 1 - list(sizes).index(name) % 200
    if name.endswith("image_size"):
        patch = sizes.get("patch_size")
        return min(value, max(SIDE, 4 * patch if isinstance(patch, int) else SIDE))
    if "depths" in sizes and name in ("embed_dim", "hidden_size", "window_size"):
        return {"embed_dim": 16, "hidden_size": 16 * 2 ** (len(stages) - 1), "window_size": 2}[name]
    limits = [most for pattern, most in _MOST.items() if re.search(pattern, name)]
    if not limits and _WIDTHS.search(name) and not _OTHERS.search(name):
        limits = [WIDTH]
    return min(value, *limits) if limits else value


def _of_list(name: str, value: list[Any], lengths: set[int], layers: int) -> list[Any]:
    if len(value) in lengths and len(value) > layers:
        return [*dict.fromkeys(value), *value][:layers] if isinstance(value[0], str) else value[:layers]
    if not value or not all(map(_is_count, value)):
        return value
    if name in ("depths", "num_blocks", "layers"):
        return [1] * len(value)
    if "heads" in name:
        return [max(1, each // min(value)) for each in value]
    if re.search(r"feature_layer|indexes$", name):
        return [*range(min(len(value), LAYERS))][::-1]
    if name in ("hidden_sizes", "embed_dim", "embed_dims", "encoder_hidden_sizes", "neck_hidden_sizes"):
        return [max(8, each * 16 // min(value) // 8 * 8) for each in value]
    return [min(each, SIDE) for each in value] if name.endswith(("image_size", "img_size")) else value


def _merged(small: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in more.items():
        inner = small.get(name)
        small[name] = _merged(dict(inner), value) if isinstance(inner, dict) and value else value
    return small


def build(name: str) -> nn.Module:
    """A model of a class with random weights, none of them zero."""
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(config_of(name)).float().eval()
    return model

"""Models with a vector of an image, some with a text tower: tiny, as `save_pretrained` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from fxsplit_encoder.models.random import draw_weights

from .checkpoints import TILE

WORDS = ("a", "photo", "of", "cat", "dog", "rocket", "cup", "coffee", "the", "with", "two", "sky")
_SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
_TEXT = {
    "vocab_size": len(WORDS) + len(_SPECIAL),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 3,
}
_TOWERS = {"text_config": _TEXT, "vision_config": TILE}
_NAFLEX = {**{k: v for k, v in TILE.items() if k != "image_size"}, "num_patches": 16}
_DINO = {name: TILE[name] for name in TILE if name != "intermediate_size"}

MODELS: dict[str, dict[str, Any]] = {
    "Siglip": _TOWERS,
    "Siglip2": {"text_config": _TEXT, "vision_config": _NAFLEX},
    "CLIP": {**_TOWERS, "projection_dim": 20},
    "Dinov2": _DINO,
    "DINOv3ViT": {**_DINO, "intermediate_size": 24, "num_register_tokens": 2},
}
"""What their configurations are given, by the beginning of their class names."""

WITH_TEXT = ("Siglip", "Siglip2", "CLIP")


def save_model(directory: Path, name: str) -> tuple[Any, Path]:
    """A model with random weights, and a checkpoint of it with its tokenizer."""
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    model = getattr(transformers, f"{name}Model")(config).eval().requires_grad_(False)
    draw_weights(model, 0)
    if name in WITH_TEXT:
        model.text_model.embeddings.token_embedding.weight.data *= 25  # so that texts differ
    model.save_pretrained(directory)
    if name in WITH_TEXT:
        _tokenizer(name).save_pretrained(directory)
    return model, directory


def _tokenizer(name: str) -> Any:
    words = {word: index for index, word in enumerate([*_SPECIAL.values(), *WORDS])}
    # The end of a text is a token of its own, by which CLIP finds the row of the text.
    words["<eos>"], words["<unk>"] = 3, 2
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 3)]
    )
    inputs = ["input_ids", "attention_mask"] if name == "CLIP" else ["input_ids"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_input_names=inputs, model_max_length=12, **_SPECIAL
    )


@torch.no_grad()
def image_vector(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """What transformers makes of an image: `get_image_features` where the model has it."""
    features = getattr(model, "get_image_features", model)(**inputs)
    vector: torch.Tensor = features.pooler_output
    return vector


@torch.no_grad()
def text_vectors(model: Any, directory: Path, texts: list[str]) -> torch.Tensor:
    """What transformers makes of texts, padded as the model was trained."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    padding = "longest" if type(model).__name__ == "CLIPModel" else "max_length"
    inputs = tokenizer(texts, padding=padding, truncation=True, max_length=12, return_tensors="pt")
    vectors: torch.Tensor = model.get_text_features(**inputs).pooler_output
    return vectors

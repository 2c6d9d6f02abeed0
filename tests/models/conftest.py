import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 24,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}

SaveCheckpoint = Callable[..., Path]


@pytest.fixture
def tiny_tower() -> Qwen3VLVisionModel:
    torch.manual_seed(0)
    tower = Qwen3VLVisionModel(Qwen3VLVisionConfig(**VISION)).eval()
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.normal_(std=0.2)
    return tower


@pytest.fixture
def save_checkpoint(tmp_path: Path, tiny_tower: Qwen3VLVisionModel) -> SaveCheckpoint:
    """Saves the tiny tower as a whole model does, its language part a single tensor."""

    def save(prefix: str = "model.visual.", shards: int = 1, name: str = "checkpoint") -> Path:
        directory = tmp_path / name
        directory.mkdir()
        config = {"model_type": "qwen3_vl", "vision_config": {"model_type": "qwen3_vl", **VISION}}
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        tensors = {f"{prefix}{key}": tensor.clone() for key, tensor in tiny_tower.state_dict().items()}
        if prefix:
            tensors["model.language_model.embed_tokens.weight"] = torch.zeros(4, 4)
        if shards == 1:
            save_file(tensors, directory / "model.safetensors")
            return directory
        weight_map = {key: f"shard-{number % shards}.safetensors" for number, key in enumerate(tensors)}
        for shard in set(weight_map.values()):
            part = {key: tensor for key, tensor in tensors.items() if weight_map[key] == shard}
            save_file(part, directory / shard)
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")
        return directory

    return save


@pytest.fixture
def photograph(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (84, 130, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"

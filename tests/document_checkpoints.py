"""In place of the checkpoints that pages load: tiny models with random weights, and processors of theirs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from fxsplit_encoder.planning.limits import inferred_budgets

EXAMPLES = Path(__file__).parents[1] / "examples"
IMAGE_TOKEN, TOKENS = 61, 64
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": TOKENS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
}


def load_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes that pages load from are ones that load these."""
    from transformers import AutoModelForImageTextToText, AutoProcessor  # noqa: F401

    # Importing them has replaced `sys.modules["transformers"]`.

    def replace(name: str, made: Any) -> None:
        monkeypatch.setattr(sys.modules["transformers"], name, SimpleNamespace(from_pretrained=made))

    replace("AutoModelForImageTextToText", lambda name, **kwargs: small_model())
    replace("AutoProcessor", lambda name: Processor())


def infer_few_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller ones alone of those that are inferred: a CPU attends to each in quadratic time."""

    def few(*args: Any) -> tuple[int, ...]:
        return tuple(budget for budget in inferred_budgets(*args) if budget <= 80)

    monkeypatch.setattr("fxsplit_encoder.planning.limits.inferred_budgets", few)
    monkeypatch.setattr("fxsplit_encoder.backend.call_program.inferred_budgets", few)


def small_model() -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    config = Qwen3VLConfig(text_config=TEXT, vision_config=VISION, image_token_id=IMAGE_TOKEN)
    config.text_config.eos_token_id = None
    return Qwen3VLForConditionalGeneration(config).eval()


def image_prompt() -> Any:
    """Arguments of its `generate`, with one photograph."""
    messages = [{"content": [{"type": "image", "path": str(EXAMPLES / "images" / "cat.jpg")}]}]
    return Processor().apply_chat_template(messages, tokenize=True, return_dict=True)


class Processor:
    """A chat template and an image processor; every text is the same three tokens."""

    def apply_chat_template(self, messages: list[Any], **options: Any) -> Any:
        from transformers import BatchFeature
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        assert options["tokenize"] and options["return_dict"]
        images = [Image.open(part["path"]) for part in messages[0]["content"] if part["type"] == "image"]
        inputs = Qwen2VLImageProcessorPil(patch_size=16, max_pixels=128 * 128)(images, return_tensors="pt")
        num_tokens = int(inputs["image_grid_thw"].prod() // 4)
        ids = torch.tensor([[5, 9, *[IMAGE_TOKEN] * num_tokens, 7]])
        types = (ids == IMAGE_TOKEN).long()
        made = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}
        return BatchFeature({**made, **inputs})

    def batch_decode(self, ids: torch.Tensor) -> list[str]:
        return [" ".join(map(str, row)) for row in ids.tolist()]

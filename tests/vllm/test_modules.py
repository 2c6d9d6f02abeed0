"""This library's own encoders against vLLM's classes, both loaded with one published checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm_classes import AUTO_MAP

from fxsplit_encoder.models.checkpoint import Checkpoint
from fxsplit_encoder.models.load import load_tower, read_family
from tests.vllm import engine
from tests.vllm.tiny import TEXT, TINY, WIDTH, Tiny

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Compared:
    """One encoder of ours, and the class of vLLM's that is the same."""

    tiny: Tiny
    prefix: str = ""
    """Before the names of ours in a checkpoint; where there are `published` names, they are whole."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What ours reads of config.json beside what vLLM's does."""
    published: Callable[[Any], dict[str, Tensor]] | None = None
    """The checkpoint by the names of vLLM's model, where ours is transformers' under names of its own."""
    inputs: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """A batch of vLLM's as ours takes it."""
    encode: Callable[[Any, dict[str, Any]], Any] = lambda model, batch: model.embed_multimodal(**batch)
    """What vLLM's model makes of a batch, as far as ours goes."""


def _without_projector(model: Any, batch: dict[str, Any]) -> list[Tensor]:
    features = model.vision_tower(batch["pixel_values"], batch["grid_thws"])
    return [item.flatten(1) for item in features]


def _step3p7(model: Any) -> dict[str, Tensor]:
    names = {
        ".attn.qkv_proj.weight": ".attn.in_proj_weight",
        ".attn.qkv_proj.bias": ".attn.in_proj_bias",
        ".mlp.fc1": ".mlp.c_fc",
        ".mlp.fc2": ".mlp.c_proj",
    }
    found = {}
    for name, tensor in model.named_parameters():
        if name.startswith(("vision_model.", "vit_large_projector.")):
            for own, published in names.items():
                name = name.replace(own, published)
            found[f"model.{name}"] = tensor
    return found


def _renamed(**names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda batch: {names.get(name, name): value for name, value in batch.items()}


STEP3P7 = Tiny(
    {
        **TINY["Step3-VL"].config,
        "architectures": ["Step3p7ForConditionalGeneration"],
        "model_type": "step3p7",
        "auto_map": AUTO_MAP,
        "text_config": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **TEXT},
        "vision_config": {
            # The names of vLLM's class, and those of transformers'.
            **dict(width=WIDTH, layers=2, heads=4, output_dim=None, ls_init_value=0.1),
            **dict(use_abs_posemb=True, use_cls_token=False, use_rope2d=True),
            **dict(use_ln_pre=True, use_ln_post=False, hidden_act="quick_gelu"),
            **dict(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4),
            **dict(image_size=728, patch_size=56, mlp_ratio=1.5),
        },
    },
    TINY["Step3-VL"].inputs,
)

COMPARED = {
    "DeepSeek-OCR": Compared(
        TINY["DeepSeek-OCR"],
        "model.",
        {
            "base_size": 256,
            "image_size": 128,
            "vision_config": {
                "width": {
                    "clip-l-14-224": dict(layers=2, heads=4, width=WIDTH, image_size=64, patch_size=16),
                    "sam_vit_b": dict(
                        layers=2,
                        heads=4,
                        width=WIDTH,
                        global_attn_indexes=[1],
                        downsample_channels=[512, WIDTH],
                        image_size=256,
                    ),
                }
            },
        },
    ),
    "Kimi-VL": Compared(TINY["Kimi-VL"]),
    "Kimi-K2.5": Compared(
        TINY["Kimi-K2.5"],
        published=lambda model: {n: t for n, t in model.named_parameters() if n.startswith("vision_tower.")},
        inputs=_renamed(grid_thws="image_grid_thw"),
        encode=_without_projector,
    ),
    "Step3": Compared(TINY["Step3-VL"]),
    "Step-3.7": Compared(
        STEP3P7,
        published=_step3p7,
        inputs=_renamed(patch_pixel_values="pixel_values_local", num_patches="num_local_patches"),
    ),
}
IMAGES = {"Step-3.7": TINY["Step3-VL"].images}


@pytest.fixture
def columns_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers 5.17 turns rows and columns of Step-3.7's rotary embedding around; 5.23 does not."""
    from transformers.models.step3p7 import modeling_step3p7

    own = modeling_step3p7.Step3p7VisionRotaryEmbedding.recomposition_frequencies
    in_order = own(None, torch.tensor([[[0.0], [1.0]]]))[0, :2].tolist() == [1.0, 0.0]
    if not in_order:
        monkeypatch.setattr(
            modeling_step3p7.Step3p7VisionRotaryEmbedding,
            "recomposition_frequencies",
            lambda self, frequencies: own(self, frequencies.flip(1)),
        )


@pytest.mark.parametrize("name", COMPARED)
def test_one_checkpoint_gives_the_same_rows(name: str, tmp_path: Path, columns_first: None) -> None:
    compared = COMPARED[name]
    tiny = compared.tiny
    settings = {**tiny.config, **compared.settings}
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with tiny.small():
        config = engine.engine_config(tiny.config)
        model = engine.build(config)
        if compared.published is not None:
            published = {n: torch.randn_like(t) * 0.1 for n, t in compared.published(model).items()}
        else:
            family, read = read_family(Checkpoint.locate(tmp_path))
            ours = family.empty_tower(read, CPU)
            engine.randomize(ours)
            published = {f"{compared.prefix}{n}": t for n, t in ours.named_parameters()}
        save_file(
            {n: t.detach().contiguous().clone() for n, t in published.items()}, tmp_path / "model.safetensors"
        )
        loaded = model.load_weights(iter(published.items()))
        assert len(loaded) >= len(published) / 2  # fused ones are fewer
        family, _ = read_family(Checkpoint.locate(tmp_path))
        tower = family.wrap(load_tower(tmp_path, torch.float32, CPU))
        for sizes in tiny.images or IMAGES[name]:
            batch = tiny.inputs(tiny.modality, sizes)
            with torch.no_grad():
                theirs = torch.cat(list(compared.encode(model, dict(batch))))
                own = encode(tower, compared.inputs(batch))
            torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def encode(tower: Any, batch: dict[str, Any]) -> Tensor:
    import fxsplit_encoder as fx

    config = fx.EncoderConfig(enabled=False, max_items_per_batch=1)
    return torch.cat(fx.EncoderCudaGraphManager(tower, config).execute(batch))

from __future__ import annotations

from typing import Any

import pytest

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.models.random import demo_tower
from fxsplit_encoder.models.registry import ARCHITECTURES, FAMILIES, architecture

# Blocks, millions of parameters of the tower with its projector, and columns of an embedding.
SIZES = {
    "qwen3-vl-8b": (27, 576.4, 4 * 4096),
    "qwen3.5-9b": (27, 456.0, 4096),
    "qwen3.5-27b": (27, 460.7, 5120),
    "qwen2.5-vl-3b": (32, 668.7, 2048),
    "qwen2.5-vl-7b": (32, 676.6, 3584),
    "qwen2-vl-2b": (32, 665.3, 1536),
    "qwen2-vl-7b": (32, 675.8, 3584),
    "glm-4.1v-9b": (24, 892.5, 4096),
    "glm-4.6v": (24, 858.7, 4096),
    "kimi-vl-a3b": (27, 447.5, 2048),
    "kimi-k2.5": (27, 416.9, 4608),
    "internvl3-8b": (24, 304.0 + 27.5, 3584),
    "internvl3-38b": (45, 5536.5 + 91.8, 5120),
    "llama4": (34, 851.0 + 21.0, 5120),
    "siglip-so400m-384": (27, 428.2, 1152),
    "clip-l-336": (24, 303.5, 1024),
    "dinov2-l-518": (24, 304.4, 1024),
    "deepseek-ocr": (24, 401.4, 1280),
    "step3-vl": (63, 4675.4, 7168),
    "step3p7": (47, 1955.8 + 25.2, 4096),
}


def test_every_architecture_is_tested() -> None:
    assert SIZES.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("model", SIZES)
def test_towers_have_their_published_sizes(model: str) -> None:
    blocks, millions, hidden = SIZES[model]
    tower = demo_tower(device="meta", model=model)
    wrapped = architecture(model).family.wrap(tower)
    assert architecture(model).blocks == blocks
    assert sum(p.numel() for p in tower.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    assert wrapped.out_hidden_size == hidden


def test_every_architecture_is_of_the_family_that_its_checkpoint_has() -> None:
    for known in ARCHITECTURES.values():
        assert known.family is FAMILIES[known.model_type]


def vision(model: str, blocks: int) -> dict[str, Any]:
    settings: dict[str, Any] = architecture(model).settings(blocks)["vision_config"]
    return settings


@pytest.mark.parametrize(("blocks", "levels"), [(1, [0]), (2, [0, 1]), (4, [1, 2, 3]), (27, [8, 16, 24])])
def test_deepstack_levels_fit_the_depth(blocks: int, levels: list[int]) -> None:
    assert vision("qwen3-vl-8b", blocks)["deepstack_visual_indexes"] == levels


@pytest.mark.parametrize(("blocks", "full"), [(1, [0]), (2, [1]), (10, [7, 9]), (32, [7, 15, 23, 31])])
def test_full_attention_is_every_eighth_block_and_the_last(blocks: int, full: list[int]) -> None:
    assert vision("qwen2.5-vl-7b", blocks)["fullatt_block_indexes"] == full


@pytest.mark.parametrize(("blocks", "layers", "whole"), [(1, 1, [0]), (4, 2, [1]), (24, 12, [2, 5, 8, 11])])
def test_sam_has_half_as_many_blocks_as_clip(blocks: int, layers: int, whole: list[int]) -> None:
    sam = vision("deepseek-ocr", blocks)["width"]["sam_vit_b"]
    assert (sam["layers"], sam["global_attn_indexes"]) == (layers, whole)


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"--model gpt: expected one of qwen3-vl-8b, .*step3p7"):
        demo_tower(1, model="gpt")


@pytest.mark.parametrize("blocks", [0, 28])
def test_a_tower_has_1_to_all_blocks(blocks: int) -> None:
    with pytest.raises(InputError, match=f"blocks: expected 1 to 27; got {blocks}"):
        demo_tower(blocks)

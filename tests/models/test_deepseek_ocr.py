from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from fxsplit_encoder.models.deepseek_ocr import deepseek_crops
from fxsplit_encoder.models.prepare import ProcessorSettings, load_inputs
from fxsplit_encoder.models.registry import FAMILIES

from .checkpoints import CHECKPOINTS
from .processors import noise


@pytest.mark.parametrize(
    ("size", "side", "grid"),
    [
        ((640, 640), 640, (1, 1)),
        ((1280, 640), 640, (2, 1)),
        ((2000, 2000), 640, (3, 3)),
        ((500, 4000), 640, (1, 8)),
        ((640, 640), 1024, (1, 1)),
        ((1000, 500), 1024, (2, 1)),
    ],
)
def test_large_pages_are_cut(size: tuple[int, int], side: int, grid: tuple[int, int]) -> None:
    found, crops = deepseek_crops(noise(*size), side, 9)
    assert found == grid
    assert len(crops) == (grid[0] * grid[1] if grid != (1, 1) else 0)
    assert {crop.size for crop in crops} <= {(side, side)}


@pytest.mark.parametrize(
    ("whole", "crop", "crops", "tokens"),
    [
        (512, 512, (0, 0), 8 * 9 + 1),
        (1024, 1024, (0, 0), 16 * 17 + 1),
        (1024, 640, (2, 1), 16 * 17 + 1 + 10 * 21),
        (1280, 1024, (2, 1), 20 * 21 + 1 + 16 * 33),
    ],
)
def test_the_modes_of_deepseek_ocr_are_read(
    whole: int, crop: int, crops: tuple[int, int], tokens: int, tmp_path: Path
) -> None:
    """Of the same page, from what config.json sets beside the encoders."""
    name = "DeepseekOCRForCausalLM"
    settings = {**CHECKPOINTS[name][0], "base_size": whole, "image_size": crop}
    Image.new("RGB", (1000, 500), (255, 255, 255)).save(tmp_path / "page.png")
    preparation = FAMILIES[name].prepare(settings, ProcessorSettings())
    inputs = load_inputs([tmp_path / "page.png"], preparation)
    assert inputs.items[0].layout == {"crops": crops}
    wrapped = FAMILIES[name].wrap(FAMILIES[name].build(settings))
    assert [view.shape[-1] for view in wrapped.views.values()] == [whole, crop]
    (spec,) = wrapped.get_encoder_cudagraph_item_specs(inputs.mm_kwargs)
    assert spec.output_tokens == tokens
    for path, view in wrapped.views.items():
        (tiles,) = wrapped.tiles(inputs.mm_kwargs, path)
        assert tiles.shape[0] * view.tokens == spec.path_output_tokens[path]
    # The upper edge is gray where the page keeps its aspect ratio; a small mode without crops stretches it.
    edge = inputs.mm_kwargs["pixel_values"][0, :, 0]
    assert edge.unique().tolist() == pytest.approx([1.0 if whole == 512 else 127 / 127.5 - 1])

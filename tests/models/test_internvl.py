from __future__ import annotations

from pathlib import Path

from fxsplit_encoder.models.prepare import ProcessorSettings, load_inputs
from fxsplit_encoder.models.registry import FAMILIES

from .checkpoints import clip


def test_a_frame_is_a_tile_for_internvl(tmp_path: Path) -> None:
    preparation = FAMILIES["internvl"].prepare({"model_type": "internvl"}, ProcessorSettings())
    inputs = load_inputs([clip(tmp_path / "clip.webp", 3)], preparation)
    assert inputs.mm_kwargs["pixel_values_videos"].shape == (3, 3, 448, 448)
    assert inputs.mm_kwargs["video_num_patches"].tolist() == [3]
    assert inputs.items[0].layout == {"tiles": 3}

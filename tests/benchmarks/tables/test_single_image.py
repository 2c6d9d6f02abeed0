from __future__ import annotations

from storage import RESULTS, load
from tables.single_image import images, modes

STORED = load(RESULTS / "single_image_h200.json")


def test_a_picture_has_the_pixels_of_its_patches() -> None:
    text = images(STORED, "qwen3-vl-8b")
    assert text is not None
    assert "| 1344x1344   |      7056 |" in text
    assert "commit 22c263db4" in text


def test_only_the_tower_that_was_measured_has_figures() -> None:
    assert images(STORED, "internvl3-8b") is modes(STORED, "internvl3-8b") is None

"""Classes that the rules serve give eager's outputs: a fixed tenth of them, `make test-all` each."""

from __future__ import annotations

import zlib

import pytest

import fxsplit_encoder as fx

from .classes import CONFIGS, PAGE, compare

REFUSED = {
    "GlmImageVisionModel": "its forward also reads grid_thw, beside position_ids",
    "HunYuanVLVisionTransformer": "its forward also reads grid_thw, beside cu_seqlens",
    "Lfm3VlVisionModel": "its forward also reads grid_thw, beside position_ids",
    "ViTMAEModel": "it draws random numbers",
    "VideoLlama3VisionModel": "its forward also takes merge_sizes",
}


def is_of_the_tenth(name: str) -> bool:
    return zlib.crc32(name.encode()) % 10 == 0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if is_of_the_tenth(name) else pytest.mark.exhaustive)
        for name in sorted(CONFIGS)
    ],
)
def test_outputs_are_those_of_eager(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(fx.UnsupportedTowerError, match=REFUSED[name]):
            compare(name)
        return
    compared = compare(name)
    assert compared.difference <= 1e-5
    assert compared.hits >= 3


def test_the_page_has_every_class() -> None:
    lines = PAGE.read_text().splitlines()
    assert [line.split(" ")[1] for line in lines if line.startswith("| ")][1:] == sorted(CONFIGS)

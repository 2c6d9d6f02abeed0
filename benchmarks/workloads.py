"""What the benchmarks encode: requests of images, clips, tiles and pages, by name."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

Size = tuple[int, int]
"""(height, width) in pixels."""

MEDIAN_TOKENS = 500
SIGMA = 0.6
MOST_IMAGES = 16
MOST_TOKENS = 8192
_PHOTO_REQUESTS = 12
_PIXELS_PER_TOKEN = 32
_CLIP: Size = (256, 448)
_MIXED: tuple[Size, ...] = ((224, 224), (448, 448), (672, 448), (896, 896), (320, 640), (768, 1024))


@dataclass(frozen=True)
class Request:
    """What is encoded at once, before a tower says how many patches that is."""

    images: tuple[Size, ...] = ()
    clips: tuple[tuple[int, Size], ...] = ()
    """Frames, and the size of each."""
    tiles: tuple[int, ...] = ()
    """Tiles of every image (InternVL), or crops beside every whole page (DeepSeek-OCR)."""


Workload = tuple[Request, ...]
"""Requests that are timed in turn."""


def random_grid(generator: random.Random) -> tuple[int, int, int]:
    """The grid of one photograph, merged 2 x 2: output tokens are lognormal, aspect ratios up to 2 to 1."""
    tokens = min(MOST_TOKENS, generator.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))
    ratio = math.exp(generator.uniform(-math.log(2), math.log(2)) / 2)
    height, width = (max(1, round(side)) for side in (math.sqrt(tokens) * ratio, math.sqrt(tokens) / ratio))
    return 1, 2 * height, 2 * width


def most_square(count: int) -> tuple[int, int]:
    """(columns, rows) of so many crops; a page without any is its own single one."""
    rows = next((r for r in range(math.isqrt(count), 0, -1) if count % r == 0), 1)
    return max(1, count) // rows, rows


def photographs(count: int, most_images: int = MOST_IMAGES) -> Workload:
    """So many requests of mixed photographs, sized for 32 x 32 pixels an output token; the same each time."""
    generator, scale = random.Random(0), _PIXELS_PER_TOKEN // 2
    requests = []
    for _ in range(count):
        grids = [random_grid(generator) for _ in range(generator.randint(1, most_images))]
        requests.append(Request(images=tuple((scale * h, scale * w) for _, h, w in grids)))
    return tuple(requests)


def _images(*sizes: Size) -> Workload:
    return (Request(images=sizes),)


WORKLOADS: Mapping[str, Mapping[str, Workload]] = {
    "packed": {
        **{f"1x{side}": _images((side, side)) for side in (224, 448, 896, 1344)},
        "mixed8": _images(*_MIXED, (512, 512), (640, 960)),
        "mixed8_big": _images(*_MIXED[:5], (1344, 1344), _MIXED[5], (512, 512)),
        "20x336": _images(*[(336, 336)] * 20),
        "photos": photographs(_PHOTO_REQUESTS),
        **{f"clip{frames}": (Request(clips=((frames, _CLIP),)),) for frames in (16, 32, 64)},
    },
    "tiles": {
        **{f"tiles{count}": (Request(tiles=(count,)),) for count in (1, 4, 12)},
        "tiles_mixed8": (Request(tiles=(1, 3, 5, 7, 2, 13, 1, 5)),),
        "clip16": (Request(clips=((16, _CLIP),)),),
    },
    "pages": {
        **{f"crops{count}": (Request(tiles=(count,)),) for count in (0, 4, 9)},
        "pages_mixed4": (Request(tiles=(0, 4, 6, 2)),),
    },
}
"""By what a tower takes (patches, tiles, whole pages with crops) and by name."""

README = ("1x224", "1x448", "1x896", "1x1344", "mixed8", "mixed8_big", "20x336")
"""Of packed towers: those of the README's table."""

QUICK_WORKLOADS: Mapping[str, Mapping[str, Workload]] = {
    "packed": {
        "1x64": _images((64, 64)),
        "1x128": _images((128, 128)),
        "mixed3": _images((64, 96), (64, 64), (32, 64)),
    },
    "tiles": {"tiles1": WORKLOADS["tiles"]["tiles1"]},
    "pages": {"crops0": WORKLOADS["pages"]["crops0"]},
}
"""Those that a CPU encodes in a moment."""

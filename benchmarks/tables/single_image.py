"""What was measured of single images before there was `encoder.py`: shown where that has no figures yet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from environment import in_words

from fxsplit_encoder.config import IMPLEMENTED_MODES
from tables.layout import by_columns

_TOWER = "qwen3-vl-8b"
_PATCH = 16
_IMAGES = {
    "one image": "image",
    "patches": "patches",
    "Hugging Face eager": "HF eager",
    "its CUDA graph, exact shape (GPU time)": "FA2 graph",
    "ours, `full` (GPU time of the replay)": "full",
    "ours, `manager.execute`": "execute",
    "eager / execute": "HF eager / execute",
}
# What `auto` takes was measured of the whole call.
_MODES = {"patches": "patches", "eager": "HF eager"} | {
    f"`{mode}`": "execute" if mode == "auto" else mode for mode in IMPLEMENTED_MODES
}


def images(stored: Mapping[str, Any], tower: str) -> str | None:
    """Milliseconds of one image by eager, its CUDA graph and ours."""
    return _text(stored, tower, _IMAGES, "Milliseconds, medians.")


def modes(stored: Mapping[str, Any], tower: str) -> str | None:
    """Milliseconds of one image in every mode that there was."""
    caption = "Milliseconds of one image, medians; `full` and `piecewise`: GPU time of the replay alone."
    return _text(stored, tower, _MODES, f"{caption} -: not measured yet.")


def _text(stored: Mapping[str, Any], tower: str, columns: Mapping[str, str], caption: str) -> str | None:
    if tower != _TOWER:
        return None
    rows = []
    for row in stored["rows"]:
        side = math.isqrt(row["patches"]) * _PATCH
        rows.append({**row, "image": f"{side}x{side}"})
    where = in_words(stored, stored["tower"])
    return f"{by_columns(columns, rows)}\n\n{caption} An earlier version: {where}."

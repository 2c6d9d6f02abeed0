"""Modules of all kinds, for a test that the backend gives eager's results; `entries` says how to add one."""

from .entries import Entry, of
from .mixing import EFFECTS, OVER_TOKENS, SEGMENTS, SHAPES, SIZES, VALUES
from .runs import Run, draw

_MADE = OVER_TOKENS | SIZES | VALUES | SEGMENTS | EFFECTS | SHAPES
ZOO = {name: made if isinstance(made, Entry) else of(made) for name, made in _MADE.items()}
"""By name: tokens that others, or their number, may change."""

__all__ = ["ZOO", "Entry", "Run", "draw"]

"""Modules of all kinds, for a test that the backend gives eager's results; `entries` says how to add one."""

from .entries import Entry, entries
from .independent import INDEPENDENT as _INDEPENDENT
from .mixing import EFFECTS, OVER_TOKENS, SEGMENTS, SHAPES, SIZES, VALUES
from .runs import Run, draw

MIXING = entries(OVER_TOKENS, SIZES, VALUES, SEGMENTS, EFFECTS, SHAPES)
"""By name: tokens that others, or their number, may change."""

INDEPENDENT = entries(_INDEPENDENT)
"""By name: tokens that no other changes."""

__all__ = ["INDEPENDENT", "MIXING", "Entry", "Run", "draw"]

"""Modules of all kinds, for a test that the backend gives eager's results; `entries` says how to add one."""

from .entries import Entry, entries
from .mixing import EFFECTS, OVER_TOKENS, SEGMENTS, SHAPES, SIZES, VALUES
from .runs import Run, draw

ZOO = entries(OVER_TOKENS, SIZES, VALUES, SEGMENTS, EFFECTS, SHAPES)
"""By name: tokens that others, or their number, may change."""

__all__ = ["ZOO", "Entry", "Run", "draw"]

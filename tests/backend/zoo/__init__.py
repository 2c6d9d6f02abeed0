"""Modules of all kinds, for a test that the backend gives eager's results; `entries` says how to add one."""

from .effects import EFFECTS
from .entries import Entry, entries
from .independent import INDEPENDENT as _INDEPENDENT
from .neighbours import NEIGHBOURS
from .over_tokens import OVER_TOKENS
from .products import PRODUCTS
from .runs import Case, Run, draw
from .segments import SEGMENTS
from .shapes import SHAPES
from .sizes import SIZES
from .values import VALUES

MIXING = entries(OVER_TOKENS, NEIGHBOURS, PRODUCTS, SIZES, VALUES, SEGMENTS, EFFECTS, SHAPES)
"""By name: tokens that others, or their number, may change. Operations alone are attacked by the fuzzer of
tests/compile/padding; here are ways in which a module can go wrong behind the backend.
"""

INDEPENDENT = entries(_INDEPENDENT)
"""By name: tokens that no other changes."""

__all__ = ["INDEPENDENT", "MIXING", "Case", "Entry", "Run", "draw"]

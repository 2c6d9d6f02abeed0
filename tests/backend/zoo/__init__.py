"""Modules of all kinds, for a test that the backend gives eager's results; `entries` says how to add one."""

from .effects import EFFECTS
from .entries import Entry, entries
from .independent import INDEPENDENT as _INDEPENDENT
from .integers import INTEGERS
from .neighbours import CONVOLUTIONS, WINDOWS
from .norms import NORMS
from .orders import ORDERS
from .products import PRODUCTS
from .reductions import REDUCTIONS
from .runs import Case, Run, draw
from .segments import SEGMENTS
from .shapes import SHAPES
from .sizes import SIZES
from .values import VALUES

MIXING = entries(
    REDUCTIONS,
    ORDERS,
    NORMS,
    CONVOLUTIONS,
    WINDOWS,
    PRODUCTS,
    SIZES,
    INTEGERS,
    VALUES,
    SEGMENTS,
    EFFECTS,
    SHAPES,
)
"""By name: tokens that others, or their number, may change."""

INDEPENDENT = entries(_INDEPENDENT)
"""By name: tokens that no other changes."""

__all__ = ["INDEPENDENT", "MIXING", "Case", "Entry", "Run", "draw"]

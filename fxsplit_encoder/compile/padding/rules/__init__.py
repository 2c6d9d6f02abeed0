"""The rules, a file for each kind of operation: which dimension of a result is independent, and why."""

from fxsplit_encoder.compile.padding.rules.elementwise import COPIES, pointwise
from fxsplit_encoder.compile.padding.rules.lookups import ATTENTIONS, DENSE_ATTENTIONS
from fxsplit_encoder.compile.padding.rules.reductions import SIZED_WITH_ROWS
from fxsplit_encoder.compile.padding.rules.shapes import CONSTRUCTORS, MOVERS, RESHAPES
from fxsplit_encoder.compile.padding.states import RULES

SIZED = frozenset((*CONSTRUCTORS, *COPIES, *RESHAPES, "varlen_attention"))
"""These take sizes, which may follow the token count: their rules and the sizes of their results decide."""

__all__ = [
    "ATTENTIONS",
    "CONSTRUCTORS",
    "COPIES",
    "DENSE_ATTENTIONS",
    "MOVERS",
    "RULES",
    "SIZED",
    "SIZED_WITH_ROWS",
    "pointwise",
]

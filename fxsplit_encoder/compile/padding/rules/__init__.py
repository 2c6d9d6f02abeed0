"""The rules, a file for each kind of operation: which dimension of a result is independent, and why."""

from fxsplit_encoder.compile.padding.rules import (  # noqa: F401  (each registers its rules)
    attention,
    batched,
    constructors,
    copies,
    elementwise,
    lookups,
    matrix_products,
    parts,
    reductions,
    shapes,
)
from fxsplit_encoder.compile.padding.rules.elementwise import pointwise
from fxsplit_encoder.compile.padding.rules.registry import (
    ATTENTIONS,
    CONSTRUCTORS,
    COPIES,
    DENSE_ATTENTIONS,
    LOOKUPS,
    MOVERS,
    RULES,
    SIZED,
    SIZED_WITH_ROWS,
)

__all__ = [
    "ATTENTIONS",
    "CONSTRUCTORS",
    "COPIES",
    "DENSE_ATTENTIONS",
    "LOOKUPS",
    "MOVERS",
    "RULES",
    "SIZED",
    "SIZED_WITH_ROWS",
    "pointwise",
]

"""A random call of every operation that has a rule, and of some that have none, by the rule's name."""

from . import (  # noqa: F401  (each registers its calls)
    attention,
    batched,
    constructors,
    lookups,
    matrix_products,
    parts,
    reductions,
    same,
    shapes,
    without_rules,
)
from .registry import CALLS, WITHOUT_RULES

__all__ = ["CALLS", "WITHOUT_RULES"]

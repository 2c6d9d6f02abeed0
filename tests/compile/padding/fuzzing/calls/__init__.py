"""A random call of every operation that has a rule, and of some that have none, by the rule's name."""

from . import elementwise, lookups, reductions, shapes, without_rules  # noqa: F401  (each registers its calls)
from .registry import CALLS, WITHOUT_RULES

__all__ = ["CALLS", "WITHOUT_RULES"]

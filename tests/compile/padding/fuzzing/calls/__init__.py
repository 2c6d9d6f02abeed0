"""A random call of every operation that has a rule, by the rule's name."""

from . import lookups, reductions, shapes  # noqa: F401  (each registers its calls)
from .registry import CALLS

__all__ = ["CALLS"]

"""Which items share a batch and how each batch runs, decided from sizes and costs alone. Needs no torch."""

from fxsplit_encoder.planning.costs import CostModel
from fxsplit_encoder.planning.limits import (
    CaptureKey,
    Limits,
    default_budgets,
    generate_budgets,
    inferred_budgets,
)
from fxsplit_encoder.planning.packing import pack_greedy
from fxsplit_encoder.planning.plan import Capacity, Item, Loads, MissReason, PathPlan, Plan
from fxsplit_encoder.planning.planner import Captured, build_fallback_plan, build_plan

__all__ = [
    "Capacity",
    "CaptureKey",
    "Captured",
    "CostModel",
    "Item",
    "Limits",
    "Loads",
    "MissReason",
    "PathPlan",
    "Plan",
    "build_fallback_plan",
    "build_plan",
    "default_budgets",
    "generate_budgets",
    "inferred_budgets",
    "pack_greedy",
]

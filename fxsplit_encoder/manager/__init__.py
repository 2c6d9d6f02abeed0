"""From a request's images and videos to packed batches and replays."""

from fxsplit_encoder.capture.budgets import generate_budgets, smallest_fitting
from fxsplit_encoder.capture.reasons import MissReason
from fxsplit_encoder.manager.budgets import CaptureKey, Limits, default_budgets, resolve_limits
from fxsplit_encoder.manager.cost_packing import PathLoad, pack_by_cost
from fxsplit_encoder.manager.costs import CostModel, PathTable, RouteCosts
from fxsplit_encoder.manager.manager import EncoderCudaGraphManager
from fxsplit_encoder.manager.packing import pack_greedy
from fxsplit_encoder.manager.plan import PathPlan, Plan, PlannedBatch
from fxsplit_encoder.manager.planner import build_fallback_plan, build_plan
from fxsplit_encoder.manager.statistics import BudgetStats, ManagerStats, Statistics

__all__ = [
    "BudgetStats",
    "CaptureKey",
    "CostModel",
    "EncoderCudaGraphManager",
    "Limits",
    "ManagerStats",
    "MissReason",
    "PathLoad",
    "PathPlan",
    "PathTable",
    "Plan",
    "PlannedBatch",
    "RouteCosts",
    "Statistics",
    "build_fallback_plan",
    "build_plan",
    "default_budgets",
    "generate_budgets",
    "pack_by_cost",
    "pack_greedy",
    "resolve_limits",
    "smallest_fitting",
]

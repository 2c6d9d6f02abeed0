"""Pack a request's images and videos into batches, and replay captures for them."""

from fxsplit_encoder.manager.manager import EncoderCudaGraphManager
from fxsplit_encoder.runtime.statistics import BudgetStats, ManagerStats, Statistics

__all__ = ["BudgetStats", "EncoderCudaGraphManager", "ManagerStats", "Statistics"]

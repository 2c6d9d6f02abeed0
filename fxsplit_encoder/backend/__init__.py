"""The torch.compile backend "encoder_cg": compile, capture, and dispatch by token budget."""

from fxsplit_encoder.backend.dispatch import BudgetDispatcher, dispatchers
from fxsplit_encoder.backend.entry import encoder_cg, warmup

__all__ = ["BudgetDispatcher", "dispatchers", "encoder_cg", "warmup"]

"""Every model that `accelerate` is tested with, at tiny sizes."""

from __future__ import annotations

from .grid_models import GRID_MODELS
from .tile_models import TILE_MODELS

MODELS = {**GRID_MODELS, **TILE_MODELS}

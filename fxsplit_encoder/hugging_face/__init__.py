"""Serves the vision towers of transformers' models by captures. Only a tower's forward is replaced, so that
checkpoints, devices, dtypes, adapters and training see the model that was loaded.
"""

from fxsplit_encoder.hugging_face.lifecycle import accelerate, restore, served_towers_of
from fxsplit_encoder.hugging_face.served import ServedTower, capturing_at_once

__all__ = ["ServedTower", "accelerate", "capturing_at_once", "restore", "served_towers_of"]

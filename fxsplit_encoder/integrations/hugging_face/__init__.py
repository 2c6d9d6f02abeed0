"""Models of transformers, whose vision towers are served by captures in place.

The tower's module stays where it is, and what it is: only its forward is another. So checkpoints, devices,
dtypes, adapters and training see the model that was loaded.
"""

from fxsplit_encoder.integrations.hugging_face.lifecycle import accelerate, restore, served_towers_of
from fxsplit_encoder.integrations.hugging_face.served import ServedTower, capturing_at_once

__all__ = ["ServedTower", "accelerate", "capturing_at_once", "restore", "served_towers_of"]

"""Other libraries' models, served by captures in place; and what is done alike with all that serves."""

from fxsplit_encoder.integrations.hugging_face import accelerate, restore
from fxsplit_encoder.integrations.serving import stats, warmup

__all__ = ["accelerate", "restore", "stats", "warmup"]

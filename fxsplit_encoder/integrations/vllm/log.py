"""What the plugin says, through vLLM's own handlers."""

from __future__ import annotations

import logging

from fxsplit_encoder.recent import Recent

# Below vLLM's logger, so that its settings hold and its process's name is in front.
logger = logging.getLogger("vllm.fxsplit_encoder")

_said: Recent[str, bool] = Recent(256)


def warn_once(message: str) -> None:
    """Warns of something, once in this process: managers are made more than once."""
    if not _said.get(message):
        _said[message] = True
        logger.warning("%s", message)

"""What the plugin says, through vLLM's own handlers."""

from __future__ import annotations

import logging

# Below vLLM's logger, so that its settings hold and its process's name is in front.
logger = logging.getLogger("vllm.fxsplit_encoder")

_said: set[str] = set()


def warn_once(message: str) -> None:
    """Warns of something, once in this process: managers are made more than once."""
    if message not in _said:
        _said.add(message)
        logger.warning("%s", message)

"""vLLM on a CPU, without a network and without its own search for plugins."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = (Path(__file__).parent / "site", ROOT, ROOT / "benchmarks")

os.environ.update(
    {
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_PLUGINS": "",
        "TOKENIZERS_PARALLELISM": "false",
        # For the processes that vLLM starts.
        "PYTHONPATH": os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")]),
    }
)
sys.path[:0] = map(str, PATHS)

import sitecustomize  # noqa: E402, F401

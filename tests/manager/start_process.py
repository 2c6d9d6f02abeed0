"""Processes, each with an empty cache, that start from a file and save another: print what they compiled and
returned. They are forks of one that has imported and done nothing else.
"""

from __future__ import annotations

import json
import os
import sys

import torch

import fxsplit_encoder as fx

from .mock_towers import SplitModel, batch

CONFIG = fx.EncoderConfig(token_budgets=(4, 16), max_items_per_batch=4, piece_compiler="inductor")


def start(path: str, again: str) -> None:
    manager = fx.EncoderCudaGraphManager(SplitModel(), CONFIG)
    used = manager.load_start(path)
    manager.capture()
    inductor = torch._dynamo.utils.counters["inductor"]
    outputs = manager.execute(batch(3, 5))
    manager.save_start(again)
    found = {
        "used": used,
        "hits": inductor["fxgraph_cache_hit"],
        "misses": inductor["fxgraph_cache_miss"],
        "can_compile": "torch._inductor.lowering" in sys.modules,
        "traces": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "outputs": [output.tolist() for output in outputs],
    }
    print(json.dumps(found))


def main(path: str, *saved: str) -> None:
    """Starts from `path` and saves the first of `saved`, then starts from that, and so on."""
    for again in saved:
        if (pid := os.fork()) == 0:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{again}.cache"
            start(path, again)
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        path = again


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Another process, with empty caches, that starts from a file and saves another: prints what it compiled and
returned.
"""

from __future__ import annotations

import json
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


if __name__ == "__main__":
    start(sys.argv[1], sys.argv[2])

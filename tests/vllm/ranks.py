"""`python -m tests.vllm.ranks`: two ranks of vLLM's tensor parallelism encode what the model itself does.

Rank 0 prints a line of JSON: for each rank and mode the largest difference, and the items that it encoded.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import torch
import torch.multiprocessing

from tests.vllm import (
    conftest,  # noqa: F401
    engine,
)
from tests.vllm.tiny import TINY

RANKS = 2
NAME = "Qwen2-VL"
BATCHES = [[(1, 8, 8)], [(1, 4, 8), (1, 8, 8), (1, 16, 8), (1, 2, 4)]]


def run(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    engine.start_vllm(rank, RANKS, rendezvous)
    results = {mode: encode(rank, mode) for mode in ("weights", "data")}
    gathered: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(gathered, results)
    if rank == 0:
        print(json.dumps(gathered))


def encode(rank: int, mode: str) -> dict[str, Any] | None:
    """What came of it; None: this library leaves it to vLLM."""
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    from fxsplit_encoder.integrations.vllm.adapter import make_adapter
    from fxsplit_encoder.integrations.vllm.settings import DEFAULTS

    tiny = TINY[NAME]
    compilation = {"encoder_cudagraph_token_budgets": [16, 64]}
    config = engine.engine_config(
        tiny.config, tensor_parallel_size=RANKS, mm_encoder_tp_mode=mode, compilation_config=compilation
    )
    config.parallel_config.rank = rank
    model = engine.build(config)
    tiny.adjust(model)
    adapter: Any = make_adapter(EncoderCudaGraphManager, DEFAULTS)
    with torch.inference_mode():
        manager = adapter(config, torch.device("cpu"), torch.float32, model)
        if manager.manager is None:
            return None
        manager.capture(graph_pool=None)
        difference = 0.0
        for sizes in BATCHES:
            batch = tiny.inputs("image", sizes)
            expected = model.embed_multimodal(**batch)
            for got, own in zip(manager.execute(batch), expected, strict=True):
                difference = max(difference, float((got - own).abs().max()))
    return {"difference": difference, "hits": manager.get_cumulative_stats()["graph_hits"]}


if __name__ == "__main__":
    directory = tempfile.mkdtemp()
    os.environ["VLLM_DIST_IDENT"] = os.path.basename(directory)
    torch.multiprocessing.spawn(run, (f"file://{directory}/rendezvous",), RANKS)

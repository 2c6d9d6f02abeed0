"""Free memory full of NaN: what a kernel reads without having written it shows."""

from __future__ import annotations

import torch

from fxsplit_encoder.capture.pool import GraphPool

_EACH = 4


def poison(pool: GraphPool, largest: int = 256) -> None:
    """Fills free blocks of the caching allocator, and those of a graph pool, with NaN.

    Args:
        largest: MiB of the largest blocks, a power of two.
    """
    torch.cuda.synchronize()
    _fill(largest)
    graph = torch.cuda.CUDAGraph()
    with pool.capturing():
        pool.begin(graph)
        _fill(largest)
        pool.end(graph)
    graph.replay()
    torch.cuda.synchronize()


def _fill(largest: int) -> None:
    kept = [
        torch.full(((largest >> halvings) * 2**19,), float("nan"), device="cuda", dtype=torch.bfloat16)
        for halvings in range(largest.bit_length())
        for _ in range(_EACH)
    ]
    del kept

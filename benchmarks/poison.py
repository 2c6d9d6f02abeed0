"""Free memory full of NaN: what a kernel reads without having written it shows."""

from __future__ import annotations

from typing import Any

import torch

_MEGABYTES = (256, 64, 32, 16, 8, 4, 2, 1)
_EACH = 4


def poison(manager: Any) -> None:
    """Fills free blocks of the caching allocator with NaN, and those of a manager's graph pool."""
    torch.cuda.synchronize()
    _fill()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=manager.pool.handle)
        _fill()
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()


def _fill() -> None:
    kept = [
        torch.full((megabytes * 2**19,), float("nan"), device="cuda", dtype=torch.bfloat16)
        for megabytes in _MEGABYTES
        for _ in range(_EACH)
    ]
    del kept

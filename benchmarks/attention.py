"""Attention over one segment: the packed kernel (torch's FlashAttention 2) against cuDNN's dense one.

    python benchmarks/attention.py --output benchmarks/results/attention_h200.json

16 heads of 72, bf16, queries, keys and values as a fused projection leaves them. Microseconds of the device,
medians; "first" is the milliseconds of a shape's first call, in which cuDNN plans it; "host" the microseconds
that a call keeps the CPU. "beside 8 empty" is the packed kernel with eight empty segments behind the real
one and the token count as its bound, as in a captured graph.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from environment import describe
from tabulate import tabulate
from timing import cpu_ms, gpu_ms

from fxsplit_encoder.attention import attend
from fxsplit_encoder.attention.known_segments import _attend_dense

LENGTHS = (256, 784, 1024, 1764, 2304, 3136, 4096, 7056)
HEADS, HEAD_DIM = 16, 72


def measure(length: int) -> dict[str, Any]:
    """One row of the table."""
    query, key, value = torch.randn(length, 3, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16).unbind(1)
    scale = HEAD_DIM**-0.5

    def packed(empty: int) -> Any:
        lengths = torch.tensor([0, length, *[length] * empty], dtype=torch.int32, device="cuda")
        return lambda: attend(query, key, value, lengths, length, scale)

    def dense() -> Any:
        return _attend_dense(query, key, value, 1, scale)

    torch.cuda.synchronize()
    start = time.perf_counter()
    dense()
    torch.cuda.synchronize()
    first = (time.perf_counter() - start) * 1e3
    return {
        "tokens": length,
        "packed": 1e3 * gpu_ms(packed(0)),
        "beside 8 empty": 1e3 * gpu_ms(packed(8)),
        "dense": 1e3 * gpu_ms(dense),
        "packed host": 1e3 * cpu_ms(packed(0)),
        "dense host": 1e3 * cpu_ms(dense),
        "dense first ms": first,
    }


@torch.no_grad()
def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "attention.py needs a CUDA device\n")
    rows = [measure(length) for length in LENGTHS]
    print(tabulate(rows, "keys", floatfmt=".1f"))
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({**describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Every attention kernel that is available here, over the segments that vision encoders see.

    python benchmarks/bench.py attention --output out/attention.json

16 heads of 72, bf16, queries, keys and values as a fused projection leaves them.
Microseconds of the device inside of a CUDA graph, medians: "known" with the true segments and bound,
"captured" with eight empty segments more and the token count as bound, as a budget's graph has them. "host"
is what a call keeps the CPU, "first ms" what the first call of a shape takes, where kernels are compiled or
planned. What the chooser picks for either is marked, for equal segments what it picks for a batch in a
graph, and for one segment what it picks for a graph of one; it measures for itself, on random values of the
shape's class.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from storage import Record, failing
from timing import host_us, timed

from fxsplit_encoder.kernels.attention import KERNELS, AttentionKernel, KernelChooser
from fxsplit_encoder.kernels.attention.chooser import Measurements, shape_of
from fxsplit_encoder.kernels.choice import measuring
from fxsplit_encoder.kernels.kernel import works
from fxsplit_encoder.kernels.meter import microseconds

HEADS, HEAD_DIM = 16, 72
EMPTY_SEGMENTS = 8

SEGMENTS = {
    **{str(tokens): [tokens] for tokens in (256, 784, 1024, 1764, 2304, 3136, 4096, 7056, 16384)},
    "8 mixed images": [196, 784, 1176, 3136, 800, 3072, 1024, 2400],
    "8 larger images": [196, 784, 1176, 3136, 800, 7056, 3072, 1024],
    "20 x 441": [441] * 20,
    "98 windows of 64": [64] * 98,
}


def _call(kernel: AttentionKernel, values: Any, lengths: list[int], bound: int) -> Callable[[], Any]:
    boundaries = [0, *itertools.accumulate(lengths)]
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device="cuda")
    scale = values[0].shape[-1] ** -0.5
    return lambda: kernel(*values, cu_seqlens, bound, scale)


def measure(name: str, lengths: list[int], chooser: KernelChooser) -> list[dict[str, Any]]:
    """A row for each kernel."""
    tokens, longest = sum(lengths), max(lengths)
    size = (tokens, 3, HEADS, HEAD_DIM)
    values = torch.randn(size, device="cuda", dtype=torch.bfloat16).unbind(1)
    equal = len(set(lengths)) == 1
    known = shape_of(values[0], longest, len(lengths), host_lengths=True, equal=equal)
    captured = shape_of(values[0], tokens, len(lengths) + EMPTY_SEGMENTS)
    shapes = {"known": known, "captured": captured}
    if len(lengths) == 1:
        shapes["single"] = shape_of(values[0], tokens, 1)
    if equal:
        shapes["batch"] = shape_of(values[0], longest, len(lengths), equal=True)
    chosen = {what: chooser.ranking(shape)[0] for what, shape in shapes.items()}
    rows = []
    for kernel in KERNELS:
        if not any(works(kernel, shape) for shape in shapes.values()):
            continue
        call = _call(kernel, values, lengths, longest)
        padded = _call(kernel, values, lengths + [0] * EMPTY_SEGMENTS, tokens)
        row: dict[str, Any] = {"segments": name, "kernel": kernel.name}
        with failing(row):  # one kernel's failure is a result too
            row["first ms"] = timed(call)[0]
            row["known"] = microseconds(call, captured)
            row["host"] = host_us(call, 30)
            row["captured"] = microseconds(padded, captured) if works(kernel, captured) else None
        row["chosen"] = ", ".join(what for what in shapes if chosen[what] is kernel)
        rows.append(row)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


@torch.no_grad()
def run(arguments: argparse.Namespace, record: Record) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    unavailable = {k.name: reason for k in KERNELS if (reason := k.unavailable_reason(device)) is not None}
    chooser = KernelChooser(measurements=Measurements())
    record.settings.update(heads=HEADS, head_dim=HEAD_DIM, unavailable=unavailable)
    for name, lengths in SEGMENTS.items():
        with measuring():
            rows = measure(name, lengths, chooser)
        for row in rows:
            record(row)

"""Every kernel of linear layers with an activation that is available here, over those of the vision towers of
Qwen3-VL-8B, InternVL3-8B and Qwen2.5-VL-7B.

    python benchmarks/bench.py products --output out/products.json

The layers of a block as the default passes leave them; bf16. Microseconds of the device in a CUDA graph of 27
calls, whose copies of the weight come from memory; medians. Errors are relative root mean squares against
float32; "first ms" is the first call of a kernel for a layer. What the chooser picks is marked. A kernel that
fails leaves its error. The kernels are replayed in turn, so that a change of the clock meets all. On a CPU
(`--tiny`) times are those of the wall.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from storage import Record, Row, failing
from timing import between_events, timed, wall_ms
from worker import relative_error

from fxsplit_encoder.kernels.choice import Chooser, KernelMeasurements, measuring
from fxsplit_encoder.kernels.kernel import works
from fxsplit_encoder.kernels.products.measured import KERNELS, ProductMeter, ProductShape

CALLS = 27
ROUNDS = 15
PATCHES = (196, 784, 3136, 7056)
LAYERS = {
    "fc1 + tanh GELU": (1152, 4352, "gelu_tanh"),
    "InternVL fc1 + GELU": (1024, 4096, "gelu"),
    "Qwen2.5 gate, up + SwiGLU": (1280, 2 * 3456, "swiglu"),
}
"""Features of the input and of the product, and the activation, by name."""
TINY_LAYERS = {"fc1 + tanh GELU": (16, 32, "gelu_tanh"), "gate, up + SwiGLU": (16, 64, "swiglu")}


def measure(layer: str, shape: ProductShape) -> list[Row]:
    """A row for each kernel that computes the layer."""
    rows: dict[str, Row] = {}
    replays: dict[str, Callable[[], float]] = {}
    (example,) = ProductMeter().examples(shape)
    expected = example.expected()
    for kernel in KERNELS:
        if not works(kernel, shape):
            continue
        row = rows[kernel.name] = {"layer": layer, "rows": shape.rows, "kernel": kernel.name}
        with failing(row):  # one kernel's failure is a result too
            call = example.timed(kernel)
            row["first ms"] = timed(call)[0]
            row["error"] = relative_error(example.result(kernel), expected)
            replays[kernel.name] = _recorded(call, shape.device)
    turns = [{name: replay() for name, replay in replays.items()} for _ in range(ROUNDS)]
    for name in replays:
        rows[name]["us"] = median(turn[name] for turn in turns)
    return list(rows.values())


def _recorded(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """What gives the microseconds of a call, the mean of many, each time it is called."""
    if device.type == "cpu":
        return lambda: wall_ms(call, 3, 1) * 1e3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    return lambda: between_events(graph.replay) * 1e3 / CALLS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", nargs="+", type=int, default=PATCHES, help="patches")


@torch.no_grad()
def run(arguments: argparse.Namespace, record: Record) -> None:
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    unavailable = {k.name: reason for k in KERNELS if (reason := k.unavailable_reason(device)) is not None}
    chooser = Chooser(KernelMeasurements(ProductShape, KERNELS, ProductMeter()))
    record.settings.update(calls=CALLS, tiny=arguments.tiny, unavailable=unavailable)
    for layer, (inputs, outputs, activation) in (TINY_LAYERS if arguments.tiny else LAYERS).items():
        for count in arguments.rows:
            shape = ProductShape(device, torch.bfloat16, count, inputs, outputs, True, activation)
            rows = measure(layer, shape)
            with measuring():
                chosen = chooser.ranking(shape)[0].name
            for row in rows:
                record({**row, "chosen": row["kernel"] == chosen})

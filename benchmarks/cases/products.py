"""Every kernel of linear layers with an activation that is available here, over those of the vision towers of
Qwen3-VL-8B, InternVL3-8B and Qwen2.5-VL-7B.

    python benchmarks/bench.py products --output out/products.json

The layers of a block as the default passes leave them; bf16. Microseconds of the device in a CUDA graph of a
call for each of 27 weights, so that they come from memory; medians. Errors are relative root mean squares
against float64; "first ms" is the first call of a kernel for a layer. What the chooser picks is marked. A
kernel that fails leaves its error. The kernels are replayed in turn, so that a change of the clock meets
all. On a CPU (`--tiny`) times are those of the wall.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from storage import Record, Row, failing
from timing import between_events, timed, wall_ms
from torch import Tensor
from worker import relative_error

from fxsplit_encoder.kernels.choice import KernelMeasurements, measuring
from fxsplit_encoder.kernels.kernel import works
from fxsplit_encoder.kernels.products.measured import (
    KERNELS,
    ProductChooser,
    ProductKernel,
    ProductMeter,
    ProductShape,
    activate,
)

WEIGHTS = 27
ROUNDS = 15
PATCHES = (196, 784, 3136, 7056)


@dataclass(frozen=True)
class Layer:
    """A linear layer with a bias."""

    name: str
    in_features: int
    out_features: int
    activation: str


LAYERS = (
    Layer("fc1 + tanh GELU", 1152, 4352, "gelu_tanh"),
    Layer("InternVL fc1 + GELU", 1024, 4096, "gelu"),
    Layer("Qwen2.5 gate, up + SwiGLU", 1280, 2 * 3456, "swiglu"),
)
TINY_LAYERS = (Layer("fc1 + tanh GELU", 16, 32, "gelu_tanh"), Layer("gate, up + SwiGLU", 16, 64, "swiglu"))


@dataclass(frozen=True)
class Call:
    """A layer at some number of rows, with values."""

    layer: Layer
    rows: Tensor
    weights: Sequence[Tensor]
    bias: Tensor

    @classmethod
    def of(cls, layer: Layer, rows: int, weights: int, device: torch.device) -> Call:
        generator = torch.Generator(device).manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)

        scale = layer.in_features**-0.5
        matrices = [random(layer.out_features, layer.in_features) * scale for _ in range(weights)]
        return cls(layer, random(rows, layer.in_features), matrices, random(layer.out_features))

    @property
    def shape(self) -> ProductShape:
        sizes = self.rows.shape[0], self.layer.in_features, self.layer.out_features
        return ProductShape(self.rows.device, torch.bfloat16, *sizes, True, self.layer.activation)

    def run(self, kernel: ProductKernel, weight: Tensor) -> Tensor:
        return kernel(self.rows, weight, self.bias, self.layer.activation)

    def expected(self) -> Tensor:
        values = F.linear(self.rows.double(), self.weights[0].double(), self.bias.double())
        return activate(values, self.layer.activation)


def measure(call: Call, kernels: Sequence[ProductKernel]) -> list[Row]:
    """A row for each kernel that computes the layer."""
    rows: dict[ProductKernel, Row] = {}
    replays: dict[ProductKernel, Callable[[], float]] = {}
    expected = call.expected()
    for kernel in kernels:
        if not works(kernel, call.shape):
            continue
        row = rows[kernel] = {"layer": call.layer.name, "rows": len(call.rows), "kernel": kernel.name}
        with failing(row):  # one kernel's failure is a result too
            row["first ms"] = timed(lambda kernel=kernel: call.run(kernel, call.weights[0]))[0]
            row["error"] = relative_error(call.run(kernel, call.weights[0]), expected)
            replays[kernel] = _recorded(call, kernel)
    turns = [{kernel: replay() for kernel, replay in replays.items()} for _ in range(ROUNDS)]
    for kernel in replays:
        rows[kernel]["us"] = median(turn[kernel] for turn in turns)
    return list(rows.values())


def _recorded(call: Call, kernel: ProductKernel) -> Callable[[], float]:
    """What gives the microseconds of a call, mean over the weights, each time it is called."""
    if not call.rows.is_cuda:
        return lambda: wall_ms(lambda: call.run(kernel, call.weights[0]), 3, 1) * 1e3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in call.weights:
            call.run(kernel, weight)
    graph.replay()
    return lambda: between_events(graph.replay) * 1e3 / len(call.weights)


def calls(arguments: argparse.Namespace, device: torch.device) -> Iterator[Call]:
    """Those that are asked for, one at a time: their weights take gigabytes together."""
    for layer in TINY_LAYERS if arguments.tiny else LAYERS:
        for rows in arguments.rows:
            yield Call.of(layer, rows, 1 if arguments.tiny else WEIGHTS, device)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", nargs="+", type=int, default=PATCHES, help="patches")


@torch.no_grad()
def run(arguments: argparse.Namespace, record: Record) -> None:
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    unavailable = {k.name: reason for k in KERNELS if (reason := k.unavailable_reason(device)) is not None}
    chooser = ProductChooser(measurements=KernelMeasurements(ProductShape, KERNELS, ProductMeter()))
    record.settings.update(weights=WEIGHTS, tiny=arguments.tiny, unavailable=unavailable)
    for call in calls(arguments, device):
        rows = measure(call, KERNELS)
        with measuring():
            chosen = chooser.ranking(call.shape)[0].name
        for row in rows:
            record({**row, "chosen": row["kernel"] == chosen})

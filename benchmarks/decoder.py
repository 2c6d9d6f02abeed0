"""What stands for a language model beside an encoder: the matrix products of its steps, and nothing else.

Qwen3-8B's layers with random weights in bf16, each step one CUDA graph for a number of rows: a step reads
every weight once, as a decode step does, and its products are those of a prefill of as many rows.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    hidden: int = 4096
    keys: int = 1024
    """Width of the keys, and of the values."""
    mlp: int = 12288
    layers: int = 36
    slots: int = 64
    """Requests that decode at once: the first rows of every step, whether they are taken or not."""
    rows: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Of the steps that there are: those of decoding, and of decoding with a chunk of a prompt."""


TINY = Shape(32, 16, 48, 2, 4, (4, 8, 16))


class Decoder:
    """Steps on a stream of their own.

    Args:
        shape: of the decoder, whose `hidden` is the width of embeddings.
        device: where it computes; a graph for each number of rows on CUDA.
        dtype: of its weights.
        priority: of its stream on CUDA; below 0 it goes before those of others.
    """

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, priority: int = 0) -> None:
        self.shape, self.device = shape, device
        self.stream: Any = torch.cuda.Stream(device, priority) if device.type == "cuda" else None
        generator = torch.Generator(device).manual_seed(0)
        self._layers = [_layer(shape, device, dtype, generator) for _ in range(shape.layers)]
        self.embeddings = torch.randn(max(shape.rows), shape.hidden, device=device, dtype=dtype)
        """(rows, hidden): what a step computes from. The slots come first, then the chunk."""
        self._graphs: dict[int, Any] = {}
        with self.on_stream():
            for rows in reversed(shape.rows) if device.type == "cuda" else ():
                self._graphs[rows] = self._capture(rows)

    def at_priority(self, priority: int) -> Decoder:
        """The same weights on another stream, with captures of its own: kernels of a graph have the priority
        of the stream that they were captured on.
        """
        if self.stream is None:
            return self
        other = copy.copy(self)
        other.stream = torch.cuda.Stream(self.device, priority)
        other.stream.wait_stream(self.stream)
        other._graphs = {}
        with other.on_stream():
            other._graphs = {rows: other._capture(rows) for rows in self._graphs}
        return other

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """What is computed inside comes before the next step."""
        return torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext()

    def step(self, rows: int) -> None:
        """Starts a step of at least so many rows; called on the stream."""
        rows = next(each for each in self.shape.rows if each >= rows)
        if self._graphs:
            self._graphs[rows].replay()
        else:
            self._forward(rows)

    def wait(self) -> None:
        """Until every step is over, as an engine that samples has to."""
        if self.stream is not None:
            self.stream.synchronize()

    def _capture(self, rows: int) -> Any:
        self._forward(rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self._forward(rows)
        return graph

    def _forward(self, rows: int) -> Tensor:
        hidden, width = self.embeddings[:rows], self.shape.hidden
        for attention, output, gates, down in self._layers:
            hidden = hidden + (hidden @ attention)[:, :width] @ output
            hidden = (hidden @ gates)[:, : self.shape.mlp] @ down
        return hidden


def _layer(
    shape: Shape, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Sequence[Tensor]:
    """Weights of a layer: queries with keys and values, the output of attention, gate with up, down."""
    hidden, mlp = shape.hidden, shape.mlp
    sizes = ((hidden, hidden + 2 * shape.keys), (hidden, hidden), (hidden, 2 * mlp), (mlp, hidden))
    made = []
    for rows, columns in sizes:
        weight = torch.empty(rows, columns, device=device, dtype=dtype)
        made.append(weight.normal_(0, rows**-0.5, generator=generator))
    return made

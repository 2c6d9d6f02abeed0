"""Other ways to run a tower, each at its best, to compare ours with.

They get the host metadata of a batch (positions, cumulative lengths) computed and moved to the device
beforehand, and return views that the next call overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Prepared:
    """What `encoder_cudagraph_forward` takes of a batch on every path that it has tokens on."""

    inputs: Mapping[str, Mapping[str, Tensor]]
    """By path and name, on the device."""
    tokens: list[int]
    """Rows of every item's embedding."""
    mm_kwargs: dict[str, Any]


def prepare(adapter: Any, mm_kwargs: dict[str, Any]) -> Prepared:
    """The inputs of a batch, on the device of the tower.

    Args:
        adapter: what `wrap` returns.
        mm_kwargs: as the manager takes them.
    """
    specs = adapter.get_encoder_cudagraph_item_specs(mm_kwargs)
    inputs = {}
    for path in adapter.get_encoder_cudagraph_config().paths:
        if any(spec.get_path_output_tokens(path) for spec in specs):
            buffers = adapter.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, 0, 0, path=path)
            inputs[path] = {name: _on_device(adapter, value) for name, value in buffers.values.items()}
    return Prepared(inputs, [spec.output_tokens for spec in specs], mm_kwargs)


def cut_items(adapter: Any, outputs: dict[str, Tensor], prepared: Prepared) -> list[Tensor]:
    """One tensor an item out of the outputs of all paths; where the adapter can, views of them."""
    found: dict[int, Tensor] = {}
    indices = list(range(len(prepared.tokens)))
    adapter.postprocess_encoder_output(
        outputs, indices, prepared.tokens, found, clone=False, batch_mm_kwargs=prepared.mm_kwargs
    )
    return [found[index] for index in indices]


def _on_device(adapter: Any, value: Any) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.cat(list(value))
    return tensor.to(adapter.device)


class CapturedLayout(NamedTuple):
    """A graph of the eager model for one layout."""

    graph: torch.cuda.CUDAGraph
    static: Mapping[str, Tensor]
    """What the graph reads; nothing else keeps its memory."""
    sources: Mapping[str, Tensor]
    """What is copied there before every replay."""
    output: Tensor


class EagerGraphs:
    """The eager model in one CUDA graph for every layout of segments, as SGLang's runner keys them.

    Args:
        adapter: what `wrap` returns, on a GPU.
    """

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.captured: dict[int, CapturedLayout] = {}
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        # What a layout determines is captured with it; only the pixels of a batch are copied.
        self._metadata = set(getattr(adapter, "metadata_names", ()))

    def clear(self) -> None:
        """Gives all captures back."""
        self.captured.clear()
        self._pool = torch.cuda.graph_pool_handle()  # torch takes no captures into a pool that lost its last

    def __call__(self, path: str, values: Mapping[str, Tensor]) -> Tensor:
        """The packed output of one path. Captures when `values`, of one `Prepared`, come first."""
        key = id(values)
        if key not in self.captured:
            self.captured[key] = self._capture(path, values)
        captured = self.captured[key]
        for name, source in captured.sources.items():
            captured.static[name].copy_(source)
        captured.graph.replay()
        return captured.output

    def _capture(self, path: str, values: Mapping[str, Tensor]) -> CapturedLayout:
        static = {name: tensor.clone() for name, tensor in values.items()}
        forward = self.adapter.encoder_cudagraph_forward
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                forward(dict(static), path=path)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = forward(dict(static), path=path)
        sources = {name: value for name, value in values.items() if name not in self._metadata}
        return CapturedLayout(graph, static, sources, output)


REDUCE_OVERHEAD: Mapping[str, Any] = {"dynamic": False, "mode": "reduce-overhead"}
"""Settings of `torch.compile`: one compilation, with CUDA graphs, for each size. What a run returned may be
overwritten once `torch.compiler.cudagraph_mark_step_begin` was called."""


def compile_forward(
    adapter: Any, settings: Mapping[str, Any]
) -> Callable[[str, Mapping[str, Tensor]], Tensor]:
    """The eager model through `torch.compile`: from a path's name and prepared inputs to its packed output.

    Args:
        adapter: what `wrap` returns.
        settings: of `torch.compile`, beside `fullgraph=True`.
    """
    compiled: Any = torch.compile(adapter.encoder_cudagraph_forward, fullgraph=True, **settings)
    return lambda path, values: compiled(dict(values), path=path)

"""Other ways to run a tower, each at its best, to compare ours with.

They get the host metadata of a batch (positions, cumulative lengths) computed and moved to the device
beforehand, and return views that the next call overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.cli.tower import ChosenTower
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.kernels.attention import KernelChooser
from fxsplit_encoder.kernels.attention.chooser import choosing
from fxsplit_encoder.messages import nearest
from fxsplit_encoder.models.eager import as_tensors, share_weights

RunPath = Callable[[str, Mapping[str, Tensor]], Tensor]
"""From a path and its inputs to its packed output."""


class Prepared(NamedTuple):
    """Arguments of `encoder_cudagraph_forward` for each path on which a batch has tokens."""

    inputs: Mapping[str, Mapping[str, Tensor]]
    """By path and name, on the device."""
    tokens: list[int]
    """Rows of every item's embedding."""
    mm_kwargs: dict[str, Any]


def prepare(adapter: Any, mm_kwargs: dict[str, Any]) -> Prepared:
    """The inputs of a batch, on the device of the tower."""
    specs = adapter.get_encoder_cudagraph_item_specs(mm_kwargs)
    inputs = {}
    for path in adapter.get_encoder_cudagraph_config().paths:
        if any(spec.get_path_output_tokens(path) for spec in specs):
            buffers = adapter.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, 0, 0, path=path)
            inputs[path] = {name: own.to(adapter.device) for name, own in as_tensors(buffers.values).items()}
    return Prepared(inputs, [spec.output_tokens for spec in specs], mm_kwargs)


class EagerGraphs:
    """The eager model in one CUDA graph for every layout of segments, as SGLang's runner keys them."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self._replays: dict[int, tuple[Mapping[str, Tensor], Callable[[], Tensor]]] = {}
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        # What a layout determines is captured with it; only the pixels of a batch are copied.
        self._metadata = set(getattr(adapter, "metadata_names", ()))

    def __call__(self, path: str, values: Mapping[str, Tensor]) -> Tensor:
        """The packed output of one path. Captures when `values`, of one `Prepared`, come first."""
        key = id(values)
        if key not in self._replays:
            self._replays[key] = values, self._capture(path, values)  # which keeps their identity
        _, replay = self._replays[key]
        return replay()

    def _capture(self, path: str, values: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        static = {name: tensor.clone() for name, tensor in values.items()}
        forward = self.adapter.encoder_cudagraph_forward
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                forward(dict(static), path=path)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output: Tensor = forward(dict(static), path=path)
        sources = {name: value for name, value in values.items() if name not in self._metadata}

        def replay() -> Tensor:
            for name, source in sources.items():
                static[name].copy_(source)  # nothing but this function keeps what the graph reads
            graph.replay()
            return output

        return replay


REDUCE_OVERHEAD: Mapping[str, Any] = {"dynamic": False, "mode": "reduce-overhead"}
"""Settings of `torch.compile`: one compilation, with CUDA graphs, for each size. What a run returned may be
overwritten once `torch.compiler.cudagraph_mark_step_begin` was called."""


def compile_forward(adapter: Any, settings: Mapping[str, Any]) -> RunPath:
    """The eager model through `torch.compile`."""
    compiled: Any = torch.compile(adapter.encoder_cudagraph_forward, fullgraph=True, **settings)
    return lambda path, values: compiled(dict(values), path=path)


Inputs = dict[str, Any]


class Running(NamedTuple):
    """A way that was started."""

    prepare: Callable[[Inputs], Callable[[], list[Tensor]]]
    """From a batch to what returns its items, which holds what is of this size only."""
    padding: Callable[[Inputs], float | None] = lambda mm_kwargs: None
    """The share of padding in what a batch replays; None: the way pads nothing."""
    close: Callable[[], None] = lambda: None
    """Gives memory back."""


def _eager(chosen: ChosenTower, config: fx.EncoderConfig) -> Running:
    """Runs the model's own methods, with its own attention."""
    tower = chosen.family.eager_tower(chosen.module)
    return Running(lambda mm_kwargs: partial(tower, mm_kwargs))


def _cuda_graph(chosen: ChosenTower, config: fx.EncoderConfig) -> Running:
    """Runs the eager model in one CUDA graph for each layout."""
    return _on_prepared(chosen, EagerGraphs)


def _reduce_overhead(chosen: ChosenTower, config: fx.EncoderConfig) -> Running:
    """Runs `torch.compile` with CUDA graphs, a compilation for each size."""

    def start(adapter: Any) -> RunPath:
        torch.compiler.reset()  # torch allows a function only few compilations
        return compile_forward(adapter, REDUCE_OVERHEAD)

    running = _on_prepared(chosen, start, torch.compiler.cudagraph_mark_step_begin)
    return running._replace(close=torch.compiler.reset)


def _ours(chosen: ChosenTower, config: fx.EncoderConfig) -> Running:
    """Runs the manager, with nothing prepared; captures all its sizes at the start."""
    wrapped = chosen.family.wrap(share_weights(chosen.module))
    manager = fx.EncoderCudaGraphManager(wrapped, config, log_interval=0)
    manager.capture()
    return Running(
        lambda mm_kwargs: partial(manager.execute, mm_kwargs),
        lambda mm_kwargs: manager.plan(mm_kwargs).padding_fraction,
        manager.clear,
    )


def _on_prepared(
    chosen: ChosenTower, start: Callable[[Any], RunPath], begin: Callable[[], None] = lambda: None
) -> Running:
    """Runs on metadata that is computed beforehand, with torch's FlashAttention. For batches of one size
    `start` makes what runs their paths; `begin` is called before each batch.
    """
    adapter = chosen.family.wrap(share_weights(chosen.module))
    kernels = KernelChooser("torch_flash" if chosen.device.type == "cuda" else "auto")

    @torch.no_grad()
    def prepared(mm_kwargs: Inputs) -> Callable[[], list[Tensor]]:
        inputs, run_path = prepare(adapter, mm_kwargs), start(adapter)

        @torch.no_grad()
        def run() -> list[Tensor]:
            begin()
            with choosing(kernels):
                outputs = {path: run_path(path, values) for path, values in inputs.inputs.items()}
            items: list[Tensor] = adapter.items_of(outputs, inputs.tokens, inputs.mm_kwargs)
            return items

        return run

    return Running(prepared)


class Way(NamedTuple):
    """One way to run a tower."""

    title: str
    start: Callable[[ChosenTower, fx.EncoderConfig], Running]
    needs_cuda: bool = True


WAYS: dict[str, Way] = {
    "eager": Way("eager", _eager, needs_cuda=False),
    "graph": Way("CUDA graph", _cuda_graph),
    "ours": Way("ours", _ours, needs_cuda=False),
    "reduce-overhead": Way("reduce-overhead", _reduce_overhead),
}
"""By the name that `--ways` takes, in the order in which they run."""


def check_ways(listed: str) -> list[str]:
    """The names in a list with commas between them, in the order in which they run; InputError: one of them
    is none, or there are none.
    """
    names = [name.strip() for name in listed.split(",") if name.strip()]
    for name in names or [listed]:
        if name not in WAYS:
            asked = nearest(name, list(WAYS))
            raise InputError(f"--ways {name}: no such way; {asked}expected some of {', '.join(WAYS)}")
    return [name for name in WAYS if name in names]

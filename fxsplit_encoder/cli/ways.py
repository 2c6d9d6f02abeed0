"""Other ways to run a tower, each at its best, to compare ours with.

They get the host metadata of a batch (positions, cumulative lengths) computed and moved to the device
beforehand, and return views that the next call overwrites.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.cli.tower import ChosenTower
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.kernels.attention import KernelChooser
from fxsplit_encoder.kernels.choice import choosing
from fxsplit_encoder.messages import nearest
from fxsplit_encoder.models.eager import share_weights

RunPath = Callable[[str, Mapping[str, Tensor]], Tensor]
"""From a path and its inputs to its packed output."""


@dataclass(frozen=True, eq=False)
class Prepared:
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
            inputs[path] = {name: _on_device(adapter, value) for name, value in buffers.values.items()}
    return Prepared(inputs, [spec.output_tokens for spec in specs], mm_kwargs)


def _on_device(adapter: Any, value: Any) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.cat(list(value))
    return tensor.to(adapter.device)


class EagerGraphs:
    """The eager model in one CUDA graph for every layout of segments, as SGLang's runner keys them."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self._replays: dict[int, tuple[Mapping[str, Tensor], Callable[[], Tensor]]] = {}
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
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


class Way(ABC):
    """One way to run a tower."""

    title: ClassVar[str]
    needs_cuda: ClassVar[bool] = True

    def __init__(self, chosen: ChosenTower, config: fx.EncoderConfig) -> None:
        self.chosen = chosen

    @abstractmethod
    def prepared(self, mm_kwargs: Inputs) -> Callable[[], list[Tensor]]:
        """What returns the items of a batch. It holds what is of this size only."""

    def close(self) -> None:  # noqa: B027 - most hold nothing for long
        """Gives memory back."""


class Eager(Way):
    """The model's own methods, with its own attention."""

    title = "eager"
    needs_cuda = False

    def prepared(self, mm_kwargs: Inputs) -> Callable[[], list[Tensor]]:
        """What returns the items of a batch."""
        tower = self.chosen.family.eager_tower(self.chosen.module)
        return lambda: tower(mm_kwargs)


class _OnPrepared(Way):
    """Runs on metadata that is computed beforehand, with torch's FlashAttention."""

    def __init__(self, chosen: ChosenTower, config: fx.EncoderConfig) -> None:
        super().__init__(chosen, config)
        self.adapter = chosen.family.wrap(share_weights(chosen.module))
        self._kernels = KernelChooser("torch_flash" if chosen.device.type == "cuda" else "auto")

    @torch.no_grad()
    def prepared(self, mm_kwargs: Inputs) -> Callable[[], list[Tensor]]:
        """What returns the items of a batch."""
        prepared, run_path = prepare(self.adapter, mm_kwargs), self.start()

        @torch.no_grad()
        def run() -> list[Tensor]:
            with choosing(self._kernels):
                outputs = {path: run_path(path, values) for path, values in prepared.inputs.items()}
            items: list[Tensor] = self.adapter.items_of(outputs, prepared.tokens, prepared.mm_kwargs)
            return items

        return run

    @abstractmethod
    def start(self) -> RunPath:
        """What runs the paths of batches of one size."""


class CudaGraph(_OnPrepared):
    """The eager model in one CUDA graph for each layout."""

    title = "CUDA graph"

    def start(self) -> RunPath:
        """What runs the paths of batches of one size."""
        return EagerGraphs(self.adapter)


class ReduceOverhead(_OnPrepared):
    """`torch.compile` with CUDA graphs, a compilation for each size."""

    title = "reduce-overhead"

    def prepared(self, mm_kwargs: Inputs) -> Callable[[], list[Tensor]]:
        """What returns the items of a batch."""
        run = super().prepared(mm_kwargs)

        def run_step() -> list[Tensor]:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return run()

        return run_step

    def start(self) -> RunPath:
        """What runs the paths of batches of one size."""
        torch.compiler.reset()  # torch allows a function only few compilations
        return compile_forward(self.adapter, REDUCE_OVERHEAD)

    def close(self) -> None:
        """Gives memory back."""
        torch.compiler.reset()


class Ours(Way):
    """The manager, with nothing prepared; captures all its sizes at the start."""

    title = "ours"
    needs_cuda = False

    def __init__(self, chosen: ChosenTower, config: fx.EncoderConfig) -> None:
        super().__init__(chosen, config)
        wrapped = chosen.family.wrap(share_weights(chosen.module))
        self.manager = fx.EncoderCudaGraphManager(wrapped, config, log_interval=0)
        self.manager.compile()
        self.manager.capture()

    def prepared(self, mm_kwargs: Inputs) -> Callable[[], list[Tensor]]:
        """What returns the items of a batch."""
        return lambda: self.manager.execute(mm_kwargs)

    def close(self) -> None:
        """Gives memory back."""
        self.manager.clear()


WAYS: Mapping[str, type[Way]] = {
    "eager": Eager,
    "graph": CudaGraph,
    "ours": Ours,
    "reduce-overhead": ReduceOverhead,
}
"""By the name that `--ways` takes, in the order in which they run."""


def check_ways(listed: str) -> list[str]:
    """The names in a list with commas between them, in the order in which they run.

    Raises:
        InputError: one of them is none, or there are none.
    """
    names = [name.strip() for name in listed.split(",") if name.strip()]
    for name in names or [listed]:
        if name not in WAYS:
            asked = nearest(name, list(WAYS))
            raise InputError(f"--ways {name}: no such way; {asked}expected some of {', '.join(WAYS)}")
    return [name for name in WAYS if name in names]

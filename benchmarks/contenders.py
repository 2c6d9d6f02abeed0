"""The ways to run a vision tower that are compared: others' here, ours in `our_contenders`.

Every way that is not ours is measured at its best. Except for "eager", which is what a user of transformers
runs, they get host metadata (positions, cumulative lengths) that was computed and moved to the device
beforehand and is not timed; packed towers attend by `fxsplit::varlen_attention` with torch's FlashAttention 2
pinned, one call a layer instead of one an image; and their outputs are views that the next call overwrites.
Ours looks its metadata up or computes it, and hands out memory of the caller's own, within the time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from subjects import Batch, Prepared, Subject
from torch import Tensor
from workloads import Workload

from fxsplit_encoder.attention import KernelChooser, choosing

# Each of torch.compile's static contenders compiles one graph a size.
_RECOMPILE_LIMIT = 256
_WARMUPS = 3


class Contender(ABC):
    """One way to run a tower.

    Args:
        subject: the tower; a contender may change it.
        config: for managers, the settings of `EncoderConfig` that differ from its own values.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs_cuda: ClassVar[bool] = False
    needs_compiler: ClassVar[bool] = False
    slow: ClassVar[bool] = False
    """Whether a quick run leaves it out."""

    def __init__(self, subject: Subject, config: Mapping[str, Any]) -> None:
        self.subject = subject
        self.config = config
        self.seconds: dict[str, float] = {}
        """What was done before the first request, and how long it took."""

    @classmethod
    def unavailable(cls, kind: str, takes_flash: bool, device: str, quick: bool) -> str | None:
        """Why this contender cannot run here, or not for such towers; None if it can."""
        if cls.needs_cuda and device != "cuda":
            return "needs CUDA graphs"
        if cls.needs_compiler and device == "cpu" and shutil.which("g++") is None:
            return "needs a C++ compiler"
        if cls.slow and quick:
            return "too slow for --quick"
        return None

    def why_not(self, workload: Workload) -> str | None:
        """Why it does not run a workload; None if it does."""
        return None

    def start(self) -> None:  # noqa: B027 - many have nothing to do
        """Everything that it does once, whatever the workloads."""

    def prepare(self, batch: Batch) -> None:
        """Everything that it does when a batch comes first: compile, capture, plan."""
        for _ in range(_WARMUPS):
            self.run(batch)

    @abstractmethod
    def run(self, batch: Batch) -> Any:
        """What is timed."""

    def padding(self, batch: Batch) -> float:
        """The share of padding in the tokens of what `run` replays."""
        return 0.0

    def note(self, batch: Batch) -> str:
        """How a batch is run, if there is a choice."""
        return ""

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the seconds of a block to `seconds`."""
        start = time.perf_counter()
        yield
        if self.subject.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start


class Eager(Contender):
    name = "eager"
    title = "Hugging Face eager (sdpa)"

    def run(self, batch: Batch) -> Any:
        return self.subject.eager(batch)


class EagerFlash(Eager):
    name = "eager-flash"
    title = "Hugging Face eager (flash-attn)"
    needs_cuda = True

    @classmethod
    def unavailable(cls, kind: str, takes_flash: bool, device: str, quick: bool) -> str | None:
        if not takes_flash:
            return "this tower calls scaled_dot_product_attention itself"
        if importlib.util.find_spec("flash_attn") is None:
            return "flash-attn is not installed"
        return super().unavailable(kind, takes_flash, device, quick)

    def start(self) -> None:
        self.subject.model.set_attn_implementation("flash_attention_2")


class _OnPrepared(Contender):
    """Runs on metadata that is prepared when a batch comes first."""

    def __init__(self, subject: Subject, config: Mapping[str, Any]) -> None:
        super().__init__(subject, config)
        self._prepared: dict[Batch, Prepared] = {}
        self._kernels = KernelChooser("torch_flash" if subject.device.type == "cuda" else "auto")

    def prepare(self, batch: Batch) -> None:
        self._prepared[batch] = self.load(batch)
        super().prepare(batch)

    def load(self, batch: Batch) -> Prepared:
        """The tensors of a batch, made once."""
        return self.subject.prepare(batch)

    def run(self, batch: Batch) -> Any:
        prepared = self._prepared[batch]
        with choosing(self._kernels):
            outputs = {path: self.run_path(path, values) for path, values in prepared.inputs.items()}
        return self.subject.items(outputs, prepared)

    @abstractmethod
    def run_path(self, path: str, values: Mapping[str, Tensor]) -> Tensor:
        """The packed output of one path."""


class Compile(_OnPrepared):
    """One trace for all sizes, as far as Dynamo keeps them symbolic."""

    name = "compile"
    title = "torch.compile"
    needs_compiler = True
    settings: ClassVar[Mapping[str, Any]] = {}
    inductor_options: ClassVar[Mapping[str, Any]] = {}

    def start(self) -> None:
        torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT
        torch._dynamo.config.accumulated_recompile_limit = _RECOMPILE_LIMIT
        options = {"options": dict(self.inductor_options)} if self.inductor_options else {}
        forward = self.subject.adapter.encoder_cudagraph_forward
        self._compiled: Any = torch.compile(forward, fullgraph=True, **self.settings, **options)

    def load(self, batch: Batch) -> Prepared:
        prepared = super().load(batch)
        if "dynamic" not in self.settings:
            for values in prepared.inputs.values():
                for tensor in values.values():
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return prepared

    def run_path(self, path: str, values: Mapping[str, Tensor]) -> Tensor:
        output: Tensor = self._compiled(dict(values), path=path)
        return output


class _CompileStatic(Compile):
    """One compilation, with CUDA graphs, for each size."""

    needs_cuda = True

    def why_not(self, workload: Workload) -> str | None:
        if len(workload.requests) > 1:
            return f"{len(workload.requests)} requests of other sizes, each a compilation"
        return None

    def run(self, batch: Batch) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return super().run(batch)


class CompileReduceOverhead(_CompileStatic):
    name = "compile-reduce-overhead"
    title = 'torch.compile, mode="reduce-overhead"'
    settings: ClassVar[Mapping[str, Any]] = {"dynamic": False, "mode": "reduce-overhead"}


class CompilePartition(_CompileStatic):
    """As reduce-overhead, but its CUDA graphs end before attention and begin after it."""

    name = "compile-partition"
    title = "torch.compile, Inductor's graph partition"
    settings: ClassVar[Mapping[str, Any]] = {"dynamic": False}
    inductor_options: ClassVar[Mapping[str, Any]] = {
        "triton.cudagraphs": True,
        "graph_partition": True,
        "custom_should_partition_ops": ["fxsplit::varlen_attention"],
    }

    @classmethod
    def unavailable(cls, kind: str, takes_flash: bool, device: str, quick: bool) -> str | None:
        if kind != "packed":
            return "only custom ops partition a graph; dense towers attend by torch's own"
        return super().unavailable(kind, takes_flash, device, quick)


class CompileMaxAutotune(_CompileStatic):
    name = "compile-max-autotune"
    title = 'torch.compile, mode="max-autotune"'
    settings: ClassVar[Mapping[str, Any]] = {"dynamic": False, "mode": "max-autotune"}
    slow = True


class _Captured(NamedTuple):
    """A graph of the eager model for one layout."""

    graph: torch.cuda.CUDAGraph
    static: Mapping[str, Tensor]
    """What the graph reads; nothing else keeps its memory."""
    sources: Mapping[str, Tensor]
    """What is copied there before every replay."""
    output: Tensor


class ExactGraph(_OnPrepared):
    """One CUDA graph of the eager model for every layout of segments, as SGLang's runner keys them."""

    name = "graph-exact"
    title = "eager model in one CUDA graph, exact shape"
    needs_cuda = True

    def start(self) -> None:
        self._graphs: dict[int, _Captured] = {}
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        # What a layout determines is captured with it; only the pixels of a batch are copied.
        self._metadata = set(getattr(self.subject.adapter, "metadata_names", ()))

    def run_path(self, path: str, values: Mapping[str, Tensor]) -> Tensor:
        key = id(values)
        if key not in self._graphs:
            self._graphs[key] = self._capture(path, values)
        captured = self._graphs[key]
        for name, source in captured.sources.items():
            captured.static[name].copy_(source)
        captured.graph.replay()
        return captured.output

    def _capture(self, path: str, values: Mapping[str, Tensor]) -> _Captured:
        static = {name: tensor.clone() for name, tensor in values.items()}
        forward = self.subject.adapter.encoder_cudagraph_forward
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                forward(dict(static), path=path)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = forward(dict(static), path=path)
        sources = {name: value for name, value in values.items() if name not in self._metadata}
        return _Captured(graph, static, sources, output)

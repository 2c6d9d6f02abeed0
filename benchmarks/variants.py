"""The ways to run a vision tower that are compared.

Every way that is not ours is measured at its best. Except for "eager", which is what a user of transformers
runs, they get host metadata (positions, cumulative lengths) that was computed and moved to the device
beforehand and is not timed; packed towers attend by `fxsplit::varlen_attention` with torch's FlashAttention 2
pinned, one call per layer instead of one per image; and their outputs are views that the next call
overwrites. Ours looks its metadata up or computes it, and returns memory of the caller's own, within the
time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from models import Batch, Model, captured
from torch import Tensor
from workloads import Workload

from fxsplit_encoder.cli.ways import REDUCE_OVERHEAD, EagerGraphs, Prepared, compile_forward
from fxsplit_encoder.kernels.attention import KernelChooser
from fxsplit_encoder.kernels.attention.chooser import choosing

MODES = ("auto", "full", "piecewise", "breakable", "exact", "none")

# Each of torch.compile's static variants compiles one graph per size.
_RECOMPILE_LIMIT = 256
_WARMUPS = 3


class Variant(ABC):
    """One way to run a tower.

    Args:
        model: the tower; a variant may change it.
        config: for managers, the settings of `EncoderConfig` that differ from its own values.
    """

    name: ClassVar[str]
    needs_cuda: ClassVar[bool] = False
    seconds_to_settle: ClassVar[float] = 0.0
    """How long a workload is repeated before it is timed: the variant changes how it runs what recurs."""

    def __init__(self, model: Model, config: Mapping[str, Any]) -> None:
        self.model = model
        self.config = config

    @classmethod
    def unavailable(cls, tower: str, device: str) -> str | None:
        """Why this variant cannot run here, or not such a tower; None if it can."""
        return "needs CUDA graphs" if cls.needs_cuda and device != "cuda" else None

    def why_not(self, workload: Workload) -> str | None:
        """Why it does not run a workload; None if it does."""
        return None

    def reference(self, batch: Batch) -> Tensor | None:
        """What its results are compared with; None: the model's own."""
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


class Eager(Variant):
    name = "eager"

    def run(self, batch: Batch) -> Any:
        return self.model.eager(batch)


class _OnPrepared(Variant):
    """Runs on metadata that is prepared when a batch comes first."""

    def __init__(self, model: Model, config: Mapping[str, Any]) -> None:
        super().__init__(model, config)
        self._prepared: dict[Batch, Prepared] = {}
        self._kernels = KernelChooser("torch_flash" if model.device.type == "cuda" else "auto")

    def prepare(self, batch: Batch) -> None:
        self._prepared[batch] = self.load(batch)
        super().prepare(batch)

    def load(self, batch: Batch) -> Prepared:
        """The tensors of a batch, made once."""
        return self.model.prepare(batch)

    def run(self, batch: Batch) -> Any:
        prepared = self._prepared[batch]
        with choosing(self._kernels):
            outputs = {path: self.run_path(path, values) for path, values in prepared.inputs.items()}
        return self.model.adapter.items_of(outputs, prepared.tokens, prepared.mm_kwargs)

    @abstractmethod
    def run_path(self, path: str, values: Mapping[str, Tensor]) -> Tensor:
        """The packed output of one path."""


class Compile(_OnPrepared):
    """One trace for all sizes, as far as Dynamo keeps them symbolic."""

    name = "compile"
    settings: ClassVar[Mapping[str, Any]] = {}

    def start(self) -> None:
        torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT
        torch._dynamo.config.accumulated_recompile_limit = _RECOMPILE_LIMIT
        self._compiled = compile_forward(self.model.adapter, self.settings)

    def load(self, batch: Batch) -> Prepared:
        prepared = super().load(batch)
        if "dynamic" not in self.settings:
            for values in prepared.inputs.values():
                for tensor in values.values():
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return prepared

    def run_path(self, path: str, values: Mapping[str, Tensor]) -> Tensor:
        return self._compiled(path, values)


class CompileReduceOverhead(Compile):
    """One compilation, with CUDA graphs, for each size."""

    name = "compile-reduce-overhead"
    needs_cuda = True
    settings: ClassVar[Mapping[str, Any]] = REDUCE_OVERHEAD

    def why_not(self, workload: Workload) -> str | None:
        if len(workload) > 1:
            return f"{len(workload)} requests of other sizes, each a compilation"
        return None

    def run(self, batch: Batch) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return super().run(batch)


class CompileMaxAutotune(CompileReduceOverhead):
    """The same, with products by the fastest of many kernels."""

    name = "compile-max-autotune"
    settings: ClassVar[Mapping[str, Any]] = {**REDUCE_OVERHEAD, "mode": "max-autotune"}


class ExactGraph(_OnPrepared):
    """One CUDA graph of the eager model for every layout of segments, as SGLang's runner keys them."""

    name = "graph-exact"
    needs_cuda = True

    def start(self) -> None:
        self.graphs = EagerGraphs(self.model.adapter)

    def run_path(self, path: str, values: Mapping[str, Tensor]) -> Tensor:
        return self.graphs(path, values)


class Managed(Variant):
    """A manager under `config`; what is timed is `execute`, with nothing prepared."""

    settings: ClassVar[Mapping[str, Any]]

    def start(self) -> None:
        self.manager = captured(self.model.adapter, **{**self.config, **self.settings})

    def run(self, batch: Batch) -> Any:
        return self.manager.execute(batch.mm_kwargs)

    def padding(self, batch: Batch) -> float:
        return self.manager.plan(batch.mm_kwargs).padding_fraction

    def note(self, batch: Batch) -> str:
        """What the plan replays, "budget mode" each, or why not."""
        ways: Counter[str] = Counter()
        for planned in self.manager.plan(batch.mm_kwargs).batches:
            for name, path in planned.paths.items():
                graph = self.manager.budget_graphs[name].get(path.budget or 0)
                if not path.skipped:
                    ways[path.result if graph is None else f"{path.budget} {graph.mode}"] += 1
        return ", ".join(f"{count} x {way}" if count > 1 else way for way, count in ways.items())


def _ours(mode: str) -> type[Managed]:
    settled = 10.0 if mode == "auto" else 0.0
    made = {"name": f"ours-{mode}", "settings": {"mode": mode}, "seconds_to_settle": settled}
    return type("Ours", (Managed,), made)


class Invariant(Managed):
    name = "ours-invariant"
    settings: ClassVar[Mapping[str, Any]] = {"invariant": True}


# The most telling ones first: device time may end before the last.
VARIANTS: Mapping[str, type[Variant]] = {
    variant.name: variant
    for variant in (
        Eager,
        *(_ours(mode) for mode in MODES),
        ExactGraph,
        Compile,
        CompileReduceOverhead,
        CompileMaxAutotune,
        Invariant,
    )
}
"""By name, in the order in which they run."""

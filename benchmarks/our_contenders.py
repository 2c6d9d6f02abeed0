"""What our manager and backend run: every mode, and the way of vLLM's manager by its means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from contenders import (
    Compile,
    CompileMaxAutotune,
    CompilePartition,
    CompileReduceOverhead,
    Contender,
    Eager,
    EagerFlash,
    ExactGraph,
)
from subjects import Batch, Subject

import fxsplit_encoder as fx
from fxsplit_encoder.config import MODES

# vLLM's largest budget is the least of max_num_batched_tokens and max_model_len.
_LARGEST_BUDGET = 8192


class Managed(Contender):
    """A manager under `config`; what is timed is `execute`, with nothing prepared."""

    def manager_config(self) -> fx.EncoderConfig:
        return fx.EncoderConfig(**self.config)

    def start(self) -> None:
        self.manager = fx.EncoderCudaGraphManager(self.subject.adapter, self.manager_config(), log_interval=0)
        with self.timed("compile"):
            self.manager.compile()
        with self.timed("capture"):
            self.manager.capture()

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


class BudgetGraphs(Managed):
    """The kernels of the eager model, captured whole for powers of two; a request is packed greedily.

    This is what vLLM's manager replays. Its attention is ours, and so are the packing and the copies, which
    are no slower; the patch embedding is a matrix product, as vLLM's is.
    """

    name = "graph-budgets"
    title = "eager kernels, one CUDA graph a power of two"

    def manager_config(self) -> fx.EncoderConfig:
        adapter = self.subject.adapter
        minimum, maximum = adapter.get_encoder_cudagraph_budget_range(None)
        paths = adapter.get_encoder_cudagraph_config().paths
        limits = {**self.config}
        if listed := limits.pop("token_budgets", None):
            minimum, maximum = listed[0], listed[-1]
        elif len(paths) == 1:
            maximum = _LARGEST_BUDGET
        ladders = {
            name: fx.PathConfig(
                token_budgets=tuple(fx.generate_budgets(path.min_token_budget or minimum, maximum))
            )
            for name, path in paths.items()
        }
        limits |= {"mode": "full", "packing": "greedy", "piece_compiler": "eager", "paths": ladders}
        return fx.EncoderConfig(**limits)


class Backend(Contender):
    name = "ours-backend"
    title = 'torch.compile(backend="encoder_cg")'

    @classmethod
    def unavailable(cls, kind: str, takes_flash: bool, device: str, quick: bool) -> str | None:
        if kind == "pages":
            return "a page is several calls of the module, which a manager puts together"
        return super().unavailable(kind, takes_flash, device, quick)

    def start(self) -> None:
        options = dict(self.config)
        with self.timed("compile and capture"):
            self._compiled: Any = torch.compile(
                self.subject.adapter, backend="encoder_cg", fullgraph=True, options=options
            )
            fx.warmup(self._compiled)

    def run(self, batch: Batch) -> Any:
        return self.subject.wrapped(self._compiled, batch)


def _ours(selected: str) -> type[Managed]:
    class Ours(Managed):
        name: ClassVar[str] = f"ours-{selected}"
        title: ClassVar[str] = f"ours, mode: {selected}"

        def __init__(self, subject: Subject, config: Mapping[str, Any]) -> None:
            super().__init__(subject, {**config, "mode": selected})

    return Ours


# The most telling ones first: device time may end before the last.
CONTENDERS: Mapping[str, type[Contender]] = {
    contender.name: contender
    for contender in (
        Eager,
        *(_ours(mode) for mode in MODES),
        ExactGraph,
        BudgetGraphs,
        Compile,
        CompileReduceOverhead,
        CompilePartition,
        EagerFlash,
        Backend,
        CompileMaxAutotune,
    )
}
"""By name, in the order in which they run."""

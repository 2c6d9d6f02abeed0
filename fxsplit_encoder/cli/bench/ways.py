"""The ways to run a tower that `bench` compares, each from `mm_kwargs` to one tensor an item."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.attention import KernelChooser
from fxsplit_encoder.cli.tower import ChosenTower
from fxsplit_encoder.kernels import choosing
from fxsplit_encoder.models.eager import share_weights
from fxsplit_encoder.models.ways import (
    REDUCE_OVERHEAD,
    EagerGraphs,
    Prepared,
    compile_forward,
    cut_items,
    prepare,
)

Inputs = dict[str, Any]


class Way(ABC):
    """One way to run a tower.

    Args:
        chosen: the tower, whose weights it shares.
        config: of the manager.
    """

    title: ClassVar[str]
    needs_cuda: ClassVar[bool] = True

    def __init__(self, chosen: ChosenTower, config: fx.EncoderConfig) -> None:
        self.chosen = chosen
        self.config = config

    @abstractmethod
    def __call__(self, mm_kwargs: Inputs) -> list[Tensor]:
        """The items of a batch. What is of one size only is made when that size comes first."""

    def forget(self) -> None:  # noqa: B027 - most make nothing for one size
        """Gives back what was made for the sizes so far."""

    def close(self) -> None:
        """Gives memory back."""
        self.forget()


class Eager(Way):
    """The model's own methods, with its own attention."""

    title = "eager"
    needs_cuda = False

    def __init__(self, chosen: ChosenTower, config: fx.EncoderConfig) -> None:
        super().__init__(chosen, config)
        self._tower = chosen.family.eager_tower(chosen.module)

    def __call__(self, mm_kwargs: Inputs) -> list[Tensor]:
        """The items of a batch."""
        return self._tower(mm_kwargs)


class _OnPrepared(Way):
    """Runs on metadata that is computed when a batch comes first, with torch's FlashAttention."""

    def __init__(self, chosen: ChosenTower, config: fx.EncoderConfig) -> None:
        super().__init__(chosen, config)
        self.adapter = chosen.family.wrap(share_weights(chosen.module))
        on_cuda = self.adapter.device.type == "cuda"
        self._kernels = KernelChooser("torch_flash" if on_cuda else "auto")
        self._prepared: dict[int, tuple[Inputs, Prepared]] = {}

    @torch.no_grad()
    def __call__(self, mm_kwargs: Inputs) -> list[Tensor]:
        """The items of a batch."""
        if id(mm_kwargs) not in self._prepared:  # the inputs are kept, so that no other takes their address
            self._prepared[id(mm_kwargs)] = mm_kwargs, prepare(self.adapter, mm_kwargs)
        prepared = self._prepared[id(mm_kwargs)][1]
        with choosing(self._kernels):
            outputs = {path: self.run_path(path, values) for path, values in prepared.inputs.items()}
        return cut_items(self.adapter, outputs, prepared)

    @abstractmethod
    def run_path(self, path: str, values: Mapping[str, Tensor]) -> Tensor:
        """The packed output of one path."""

    def forget(self) -> None:
        """Gives back what was made for the sizes so far."""
        self._prepared.clear()


class CudaGraph(_OnPrepared):
    """The eager model in one CUDA graph for each layout."""

    title = "CUDA graph"

    def __init__(self, chosen: ChosenTower, config: fx.EncoderConfig) -> None:
        super().__init__(chosen, config)
        self._graphs = EagerGraphs(self.adapter)

    def run_path(self, path: str, values: Mapping[str, Tensor]) -> Tensor:
        """The packed output of one path."""
        return self._graphs(path, values)

    def forget(self) -> None:
        """Gives back what was made for the sizes so far."""
        super().forget()
        self._graphs.clear()  # by the addresses of what was prepared


class ReduceOverhead(_OnPrepared):
    """`torch.compile` with CUDA graphs, a compilation for each size."""

    title = "reduce-overhead"

    def __init__(self, chosen: ChosenTower, config: fx.EncoderConfig) -> None:
        super().__init__(chosen, config)
        self._compiled = compile_forward(self.adapter, REDUCE_OVERHEAD)

    def __call__(self, mm_kwargs: Inputs) -> list[Tensor]:
        """The items of a batch."""
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return super().__call__(mm_kwargs)

    def run_path(self, path: str, values: Mapping[str, Tensor]) -> Tensor:
        """The packed output of one path."""
        return self._compiled(path, values)

    def forget(self) -> None:
        """Every size is a compilation, and torch allows a function only few of them."""
        super().forget()
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

    def __call__(self, mm_kwargs: Inputs) -> list[Tensor]:
        """The items of a batch."""
        return self.manager.execute(mm_kwargs)

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

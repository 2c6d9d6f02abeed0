"""What encodes a tower's calls: the manager, or a program behind `torch.compile`."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fxsplit_encoder.backend import warmup
from fxsplit_encoder.backend.stats import refresh_compiled, stats_of_compiled
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.manager import EncoderCudaGraphManager
from fxsplit_encoder.runtime.statistics import ManagerStats


class Runner(Protocol):
    """Encodes what an adapter takes."""

    def run(self, inputs: dict[str, Any]) -> list[Tensor]:
        """Every item's rows, (output tokens, hidden), in memory of their own."""

    def capture(self) -> None:
        """Compiles and captures whatever is not yet."""

    def stats(self) -> ManagerStats:
        """What was served so far."""

    def refresh(self) -> None:
        """As `fxsplit_encoder.refresh`."""

    def clear(self) -> None:
        """Gives all memory back."""


class ManagerRunner:
    """A tower's adapter in a manager, which captures when it is used first."""

    def __init__(self, adapter: Any, config: EncoderConfig) -> None:
        self.manager = EncoderCudaGraphManager(adapter, config)
        self._lock = threading.Lock()

    def run(self, inputs: dict[str, Any]) -> list[Tensor]:
        """As `EncoderCudaGraphManager.execute`."""
        self.capture()
        return self.manager.execute(inputs)

    def capture(self) -> None:
        """As `EncoderCudaGraphManager.capture`."""
        if not self.manager.is_captured():
            with self._lock:
                if not self.manager.is_captured():  # no other thread has done it
                    self.manager.capture()

    def stats(self) -> ManagerStats:
        """The manager's."""
        return self.manager.stats()

    def refresh(self) -> None:
        """As `EncoderCudaGraphManager.check_weights`."""
        self.manager.check_weights()

    def clear(self) -> None:
        """Releases every capture."""
        self.manager.clear()


class CompiledRunner:
    """An adapter behind `torch.compile(backend="encoder_cg")`, where a call is one batch. `arguments` makes
    those of its forward from `mm_kwargs`.
    """

    def __init__(
        self,
        adapter: Any,
        config: EncoderConfig,
        arguments: Callable[[Mapping[str, Any]], tuple[Tensor, ...]],
    ) -> None:
        self.adapter = adapter
        self._arguments = arguments
        adapter.returns_rows = True
        # Dynamo limits how often one piece of code is compiled; every tower is to have a limit of its own.
        from fxsplit_encoder.compile import with_own_code

        adapter.forward = types.MethodType(with_own_code(type(adapter).forward), adapter)
        options: Any = {"config": config}
        self._compiled = torch.compile(adapter, backend="encoder_cg", fullgraph=True, options=options)
        self._first: contextlib.AbstractContextManager[object] = threading.Lock()
        """Held in the first call, which compiles."""

    def run(self, inputs: dict[str, Any]) -> list[Tensor]:
        """Encodes all items in one call."""
        specs = self.adapter.get_encoder_cudagraph_item_specs(inputs)
        with self._first, torch.inference_mode(False), torch.no_grad():
            rows = self._compiled(*self._arguments(inputs))  # type: ignore[no-untyped-call]
        self._first = contextlib.nullcontext()
        items: dict[int, Tensor] = {}
        tokens = [spec.output_tokens for spec in specs]
        self.adapter.postprocess_encoder_output(
            {"default": rows}, list(range(len(specs))), tokens, items, batch_mm_kwargs=inputs
        )
        return [items[index] for index in range(len(specs))]

    def capture(self) -> None:
        """As `warmup`."""
        with self._first:
            warmup(self._compiled)

    def stats(self) -> ManagerStats:
        """Those of the graphs that were compiled; each call is an item."""
        return stats_of_compiled(self._compiled)

    def refresh(self) -> None:
        """As `refresh_compiled`."""
        refresh_compiled(self._compiled)

    def clear(self) -> None:
        """Nothing: what was compiled is released with the adapter."""

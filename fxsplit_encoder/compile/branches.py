"""A step of a program, and the sibling stream on which marked steps run. Imports no sympy, for captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxsplit_encoder._torch.streams import Branch


@dataclass(frozen=True, slots=True)
class Step:
    """One call: a compiled piece, a splitting op or a host op. Arguments are those of `compile.program`."""

    kind: str
    """"piece", "split" or "host"."""
    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    """Slots that the results fill: one for a tensor, several for a sequence (-1: the result is not read)."""
    frees: tuple[int, ...] = ()
    """Slots that no later step reads."""
    distinct: int = -1
    """For a piece: which distinct compilation it calls."""
    nodes: tuple[str, ...] = ()
    """Names of the graph's nodes."""
    beside: bool = False
    """Whether it may run on a side stream, see `StepBranches`."""
    joins: bool = False
    """Whether it reads what a side stream computes."""


class StepBranches:
    """Runs marked steps on a sibling stream, which a CUDA graph has as a branch; without CUDA in place.

    `with_frees` keeps the slots of such a step until a step that `joins` has run. Call `join` after the last
    step, before a result is read. Unless `active` steps do not branch: no branch outlives its graph.
    """

    def __init__(self, device: torch.device, *, active: bool = True) -> None:
        self._device = device
        self._active = active
        self._branch: Branch | None = None
        self._open = False

    def run(self, step: Step, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a step where it belongs."""
        if step.joins:
            self.join()
        if not (step.beside and self._active):
            return step.call(*args, **kwargs)
        if self._branch is None:  # made here, where the stream of the capture is current
            self._branch = Branch(self._device, "steps")
        self._branch.fork()
        self._open = True
        with self._branch.entered():
            return step.call(*args, **kwargs)

    def join(self) -> None:
        """Makes later work of the current stream wait for all steps on the sibling stream."""
        if self._branch is not None and self._open:
            self._branch.join()
        self._open = False

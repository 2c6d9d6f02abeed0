"""Run the steps of a program that may go beside others on side streams, and join these."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder._torch.device import Branch

if TYPE_CHECKING:  # its module imports sympy, which no capture needs
    from fxsplit_encoder.compile.program import Step


class StepBranches:
    """Runs marked steps on a sibling stream, which a CUDA graph has as a branch.

    The program keeps what such a step reads and writes until a step that `joins` has run (`with_frees`); call
    `join` after the last step, before a result is read.

    Args:
        device: of the program. Without CUDA steps run where they stand.
        active: whether steps may run there: no branch outlives the graph that it begins in.
    """

    def __init__(self, device: torch.device, *, active: bool = True) -> None:
        self._device = device
        self._active = active
        self._branch: Branch | None = None
        self._open = False

    def placed(self, step: Step) -> Callable[..., Any]:
        """Returns what to call in place of `step.call`, with the same arguments."""
        call = step.call
        if not self._active:
            return call
        if step.beside:
            return functools.partial(self._beside, step)
        return functools.partial(self._behind, call) if step.joins and self._open else call

    def join(self) -> None:
        """Makes what is enqueued from now on wait for all steps on the sibling stream."""
        if self._branch is not None and self._open:
            self._branch.join()
        self._open = False

    def _beside(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        if self._branch is None:  # made here, where the stream of the capture is current
            self._branch = Branch(self._device, "steps")
        self._branch.fork()
        self._open = True
        with self._branch:
            return step.call(*args, **kwargs)

    def _behind(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.join()
        return call(*args, **kwargs)

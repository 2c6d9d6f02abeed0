"""Steps that run beside the ones after them: on a sibling stream, which a CUDA graph has as a branch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fxsplit_encoder._torch.branches import Branch


class StepBranches:
    """The branch of one run of a program, for the steps that are marked `beside`.

    The program keeps what such a step reads and writes until a step that `joins` has run (`with_frees`); who
    runs it calls `join` after the last step, before anyone reads a result.

    Args:
        device: of the program. Without CUDA steps run where they stand.
        active: whether steps may run beside others; not where graphs end in between, which a branch cannot
            outlive.
    """

    def __init__(self, device: torch.device, *, active: bool = True) -> None:
        self._device = device
        self._active = active
        self._branch: Branch | None = None
        self._open = False
        """Whether something runs beside that nobody has waited for."""

    def placed(self, step: Any) -> Callable[..., Any]:
        """What to call in place of `step.call`, of a `program.Step`, with the same arguments."""
        call: Callable[..., Any] = step.call
        if not self._active:
            return call
        if step.beside:
            return functools.partial(self._beside, step)
        return functools.partial(self._behind, call) if step.joins and self._open else call

    def join(self) -> None:
        """What is enqueued from now on runs after all steps that ran beside."""
        if self._branch is not None and self._open:
            self._branch.join()
        self._open = False

    def _beside(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        if self._branch is None:  # made here, where the stream of the capture is current
            self._branch = Branch(self._device, "steps")
        self._branch.fork()
        self._open = True
        with self._branch:
            return step.call(*args, **kwargs)

    def _behind(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.join()
        return call(*args, **kwargs)

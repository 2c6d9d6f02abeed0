"""The outputs of a replay as those of a call: at their true sizes, the caller's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxsplit_encoder._torch.tensors import copy_each
from fxsplit_encoder.compile import Bindings
from fxsplit_encoder.compile.program import Argument, Ref, TensorInfo
from fxsplit_encoder.compile.sizes import Size


@dataclass(frozen=True, slots=True)
class Output:
    """One output of a graph."""

    argument: Argument
    varying: tuple[tuple[int, Size], ...]
    """The dimensions whose sizes differ from call to call, with their sizes."""

    @classmethod
    def of(cls, argument: Argument, info: TensorInfo | None) -> Output:
        """That of a program's output, and of what its trace knows of it."""
        shape = () if info is None else info.shape
        return cls(argument, tuple((dim, size) for dim, size in enumerate(shape) if size.symbols))

    def of_call(self, replayed: Any, bindings: Bindings) -> tuple[Any, bool]:
        """The output at its true size; whether the next replay overwrites it.

        Args:
            replayed: what the replay returned in its place.
            bindings: of the call.
        """
        argument = self.argument
        if isinstance(argument, Size):
            return argument(bindings.symbols), False
        if not isinstance(replayed, torch.Tensor):
            return replayed, False
        assert isinstance(argument, Ref)
        made_before = bindings.slots[argument.slot]
        if made_before is not None:  # before the region
            return made_before, False
        for dim, size in self.varying:
            if (true_size := size(bindings.symbols)) != replayed.shape[dim]:
                replayed = replayed.narrow(dim, 0, true_size)
        return replayed, True


def own_outputs(outputs: Sequence[Output], replayed: Sequence[Any], bindings: Bindings) -> list[Any]:
    """All outputs at their true sizes, as the caller's own (capture rule 7).

    Args:
        replayed: what the replay returned in their places.
        bindings: of the call.
    """
    own, copies, overwritten = [], [], []
    for output, found in zip(outputs, replayed, strict=True):
        value, is_overwritten = output.of_call(found, bindings)
        if is_overwritten:
            overwritten.append(value)
            value = torch.empty_like(value)
            copies.append(value)
        own.append(value)
    copy_each(copies, overwritten)
    return own

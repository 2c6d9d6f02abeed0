"""`RecordedOps`: what stands in for a CUDA graph where there is no CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxsplit_encoder._torch.dispatch import tree_map_only
from fxsplit_encoder._torch.distributed import is_collective, wait_for
from fxsplit_encoder.capture.memory import copy_results, storage_address, tensors_in


class RecordedOps:
    """Ops with their arguments, repeated in order over the same memory.

    As with a CUDA graph, addresses, shapes and numbers of the host are those of the recording, and the
    contents of tensors those of the replay.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """The counterpart of `torch.cuda.CUDAGraph.capture_begin`; nothing has to be prepared."""

    def capture_end(self) -> None:
        """The counterpart of `torch.cuda.CUDAGraph.capture_end`."""

    def record(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], results: Any
    ) -> None:
        """Appends a call that has just been made."""
        if _changes_no_data(call, args, kwargs, results):
            return
        # Aliases: what later changes a tensor's shape in place (`unsqueeze_`) leaves them as they are.
        kept = tree_map_only(torch.Tensor, torch.Tensor.detach, (tuple(args), dict(kwargs), results))
        self._calls.append((call, *kept))

    def replay(self) -> None:
        """Repeats every call; its results go to where those of the recording are."""
        for call, args, kwargs, results in self._calls:
            made = call(*args, **kwargs)
            if is_collective(call):
                wait_for(made)  # else its result may come later
            copy_results(results, made)


def _changes_no_data(call: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any) -> bool:
    if torch.Tag.inplace_view in getattr(call, "tags", ()):
        return True
    given, made = tensors_in((tuple(args), dict(kwargs))), tensors_in(results)
    if not given and not made:  # a marker of the profiler, say
        return True
    # `reshape` is called a view and may yet copy.
    memory = {storage_address(tensor) for tensor in given}
    return bool(getattr(call, "is_view", False)) and all(storage_address(tensor) in memory for tensor in made)

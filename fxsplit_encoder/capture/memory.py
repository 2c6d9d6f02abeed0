"""Who owns the memory that a capture reads and writes.

values of captured ops     the graphs' pool; whoever reads them later borrows them
results of eager steps     buffers outside the pool, at fixed addresses, kept by the step that writes them
anything else              held strongly by the step that reads it
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import dlpack

from fxsplit_encoder._torch.distributed import local_part
from fxsplit_encoder._torch.tensors import StorageWeakRef, is_dropped, weakly
from fxsplit_encoder.errors import ReplayError

# Where Linux says how much a container may take: of cgroups version 2, and version 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def storage_address(tensor: Tensor) -> int:
    """Where the memory behind a tensor and all its views begins."""
    return local_part(tensor).untyped_storage().data_ptr()


def tensors_in(values: object) -> list[Tensor]:
    """The tensors among the arguments or the results of an op: in tuples, lists and dicts, and nowhere else.
    A capture asks this of every op, in a tenth of the time of torch's general trees.
    """
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            found += tensors_in(value)
    return found


def unstrided(tensors: Iterable[Tensor]) -> str | None:
    """How the first tensor is stored that has no strides, or more than they say; None: every one is plain.
    Its memory cannot be kept in place from replay to replay.
    """
    for tensor in tensors:
        if tensor.is_nested:
            return "nested"
        if tensor.is_quantized:
            return "quantized"
        if tensor.layout != torch.strided:
            return str(tensor.layout).removeprefix("torch.").lstrip("_")
    return None


def copy_results(kept: Any, new: Any) -> None:
    """Writes the results of a repeated call to where those of the first call are."""
    if isinstance(kept, torch.Tensor):
        kept, new = local_part(kept), local_part(new)
        if kept.data_ptr() != new.data_ptr():
            for dim, strides in enumerate(zip(kept.stride(), new.stride(), strict=True)):
                if strides == (0, 0) and kept.shape[dim] > 1:
                    # Expanded: torch does not write to one place several times.
                    kept, new = kept.narrow(dim, 0, 1), new.narrow(dim, 0, 1)
            kept.copy_(new)
    elif isinstance(kept, list | tuple):
        for old, value in zip(kept, new, strict=True):
            copy_results(old, value)


@dataclass(slots=True, eq=False)
class _Lent:
    buffer: Tensor
    alias: StorageWeakRef
    """Of what was handed out; a view of it keeps it alive too."""


class OwnedBuffers:
    """Memory for the results of eager steps: zero at first, so rows that nobody writes stay finite (capture
    rule 1).

    A buffer is lent again, to a later step of the same capture, once nobody holds the result any more: what
    has read it then comes before that step at every replay.
    """

    def __init__(self) -> None:
        self._lent: dict[tuple[object, ...], list[_Lent]] = {}
        self._written: dict[int, int] = {}

    def clear_behind(self, buffer: Tensor, rows: int) -> None:
        """Sets to zero what an earlier, larger batch has written behind the first `rows` rows: what it left
        there need not be finite.
        """
        written = self._written.get(buffer.data_ptr(), buffer.shape[0])
        if written > rows:
            buffer[rows:written].zero_()
        self._written[buffer.data_ptr()] = rows

    def acquire(
        self, like: Tensor, layout: torch.memory_format = torch.preserve_format
    ) -> tuple[Tensor, Tensor]:
        """A buffer of the shape, dtype and device of `like`, for the step that writes it, and the same memory
        to hand out. The latter keeps the memory alive, also when the step is gone.
        """
        strides = like.stride() if layout == torch.preserve_format else layout
        key = (like.shape, strides, like.dtype, like.device)
        lent = self._lent.setdefault(key, [])
        entry = next((entry for entry in lent if is_dropped(entry.alias)), None)
        if entry is None:
            buffer = torch.zeros_like(like, memory_format=layout, requires_grad=False)
        else:
            buffer = entry.buffer
            lent.remove(entry)
        # A storage of its own, which holds the buffer's. Not every dtype of one byte can be exchanged.
        raw = buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer
        alias = dlpack.from_dlpack(dlpack.to_dlpack(raw)).view(buffer.dtype)  # type: ignore[attr-defined]
        lent.append(_Lent(buffer, weakly(alias)))
        return buffer, alias


class HandedOut:
    """The memory that callers were handed and still hold, which no replay may overwrite."""

    def __init__(self) -> None:
        self._held: list[tuple[range, StorageWeakRef, str]] = []

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Remembers tensors, weakly, for as long as anybody holds their memory."""
        self._forget_dropped()
        for tensor in tensors:
            address = storage_address(tensor)
            place = range(address, address + tensor.untyped_storage().nbytes())
            self._held.append((place, weakly(tensor), f"{tuple(tensor.shape)} {tensor.dtype}"))

    def check(self, outputs: Sequence[Any]) -> None:
        """Raises ReplayError if an output shares memory with what a caller holds (capture rule 7)."""
        self._forget_dropped()
        for number, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor) or not output.numel():
                continue
            first = output.data_ptr()
            last = first + sum((n - 1) * s for n, s in zip(output.shape, output.stride(), strict=True)) * (
                output.element_size()
            )
            for place, _, what in self._held:
                if first < place.stop and place.start <= last:
                    raise ReplayError(
                        f"capture rule 7: output {number} lies in the memory of a tensor {what} that "
                        "a caller holds, which this replay would overwrite; hand out copies of outputs"
                    )

    def _forget_dropped(self) -> None:
        self._held = [entry for entry in self._held if not is_dropped(entry[1])]


def memory_of(device: torch.device) -> int:
    """Bytes of a device's memory, used or not; of the CPU, what the host allows this process at most."""
    return _memory_of(device)


@functools.cache
def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([host, *(limit for limit in map(_read_limit, _LIMITS) if limit is not None)])


def _read_limit(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def gibibytes(num_bytes: int) -> str:
    """A number of bytes for a message."""
    return f"{num_bytes / 2**30:,.1f} GiB"
